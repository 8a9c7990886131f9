"""The ranks' jobs of test_horovod_frameworks.py, one for each framework. They return plain values."""

from __future__ import annotations

import importlib
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.integrations.horovod.import_hook import install

GLOBAL_ROWS, STEPS = 8, 4
X = np.random.default_rng(0).normal(size=(STEPS, GLOBAL_ROWS, 5)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
LARGE = 300_000


def plain_losses(rate: float = 0.1) -> tuple[list[float], np.ndarray]:
    """Losses and weights of gradient descent on whole batches. The loss is the mean of (x w)**2."""
    weights = torch.tensor(W, requires_grad=True)
    losses = []
    for x in X:
        loss = (torch.tensor(x) @ weights).square().mean()
        (grad,) = torch.autograd.grad(loss, weights)
        weights = (weights - rate * grad).detach().requires_grad_()
        losses.append(loss.item())
    return losses, weights.detach().numpy()


def own_rows(x: np.ndarray, hvd: Any) -> np.ndarray:
    rows: np.ndarray = np.split(x, hvd.size())[hvd.rank()]
    return rows


def numpy_job() -> None:
    import shardwise.integrations.horovod.numpy as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for dtype in (np.float16, np.float32, np.float64, np.int32, np.int64, np.uint8, np.int8):
        x = np.arange(6, dtype=dtype).reshape(2, 3) + dtype(rank)
        assert np.array_equal(hvd.allreduce(x, op=hvd.Sum), sum(x - dtype(rank) + dtype(r) for r in range(size)))
        assert np.array_equal(hvd.allreduce(x.T, op=hvd.Max), (x - dtype(rank) + dtype(size - 1)).T)
        assert hvd.allgather(x[: rank + 1]).shape == (3, 3)
        assert hvd.broadcast(x, 1).dtype == dtype
    x = np.arange(4.0) + 10 * rank
    received, counts = hvd.alltoall(x, [1, 3] if rank == 0 else [2, 2])
    assert received.tolist() == ([0, 10, 11] if rank == 0 else [1, 2, 3, 12, 13])
    assert counts.tolist() == ([1, 2] if rank == 0 else [3, 2])
    assert hvd.reducescatter(x).tolist() == ([5, 6] if rank == 0 else [7, 8])
    assert hvd.allreduce(np.array([True, False]) if rank else np.array([True, True]), op=hvd.Min).tolist() == [
        True,
        False,
    ]
    frozen = np.ones(3)
    frozen.setflags(write=False)
    assert [one.tolist() for one in hvd.grouped_allreduce([frozen, np.full(2, rank)], op=hvd.Sum)] == [[2] * 3, [1] * 2]
    assert hvd.allreduce_(np.full(2, float(rank))).tolist() == [0.5, 0.5]
    assert hvd.allgather_object({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    hvd.shutdown()


def jax_job() -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import optax

    import shardwise.integrations.horovod.jax as hvd

    hvd.init()
    rank = hvd.rank()
    tree = {"a": jnp.arange(3.0) + rank, "b": [jnp.ones((2, 2), jnp.bfloat16) * (rank + 1)]}
    eager = hvd.allreduce(tree, op=hvd.Sum)
    compiled = jax.jit(lambda tree: hvd.allreduce(tree, op=hvd.Sum))(tree)
    for reduced in (eager, compiled):
        assert reduced["a"].tolist() == [1, 3, 5]
        assert reduced["b"][0].dtype == jnp.bfloat16
        assert reduced["b"][0].tolist() == [[3, 3], [3, 3]]
    large = jnp.full((LARGE,), float(rank))
    assert float(jax.jit(lambda x: hvd.allreduce(x * 2).sum())(large)) == LARGE
    assert hvd.allgather(jnp.ones((rank + 1, 2))).shape == (3, 2)
    assert jax.jit(hvd.allgather)(jnp.full((2,), rank)).tolist() == [0, 0, 1, 1]
    assert jax.jit(lambda x: hvd.broadcast(x, 1))(jnp.array([rank])).tolist() == [1]

    def gradient(call: Any) -> list[float]:
        x, weights = jnp.ones(2), jnp.arange(1.0, 3.0) + rank
        found: list[float] = jax.jit(jax.grad(lambda x: (call(x)[:2] * weights).sum()))(x).tolist()
        return found

    assert gradient(lambda x: hvd.allreduce(x, op=hvd.Sum)) == [3, 5]
    assert gradient(lambda x: hvd.broadcast(x, 0)) == ([1.5, 2.5] if rank == 0 else [0, 0])
    assert gradient(hvd.allgather) == ([1.5, 2.5] if rank == 0 else [0, 0])
    weights = jnp.arange(6.0).reshape(3, 2)
    of_uneven_rows = jax.grad(lambda x: (hvd.allgather(x) * weights).sum())(jnp.ones((rank + 1, 2)))
    assert of_uneven_rows.tolist() == ([[0, 1]] if rank == 0 else [[2, 3], [4, 5]])
    with pytest.raises(ValueError, match="no gradient for op=Max"):
        jax.grad(lambda x: hvd.allreduce(x, op=hvd.Max).sum())(jnp.ones(2))

    params = hvd.broadcast_parameters({"w": jnp.asarray(W) + rank}, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1))
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda params: jnp.square(x @ params["w"]).mean())(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, hvd.allreduce(loss, "loss")

    losses = []
    for x in X:
        params, state, loss = step(params, state, own_rows(x, hvd))
        losses.append(float(loss))
    hvd.shutdown()
    return {"losses": losses, "weights": np.asarray(params["w"]).tolist()}


def tensorflow_job() -> dict[str, Any]:
    import tensorflow as tf

    import shardwise.integrations.horovod.tensorflow as hvd

    tf.config.threading.set_inter_op_parallelism_threads(2)
    hvd.init()
    rank = hvd.rank()
    x = tf.constant([1.0, 2.0]) + rank
    for call in (hvd.allreduce, tf.function(hvd.allreduce)):
        assert call(x).numpy().tolist() == [1.5, 2.5]
    half = hvd.allreduce(tf.cast(x, tf.bfloat16), op=hvd.Sum)
    assert half.dtype == tf.bfloat16
    assert hvd.allgather(tf.ones((rank + 1, 2))).shape == (3, 2)
    assert tf.function(lambda x: hvd.broadcast(x, 1))(x).numpy().tolist() == [2, 3]
    assert hvd.alltoall(tf.constant([rank, rank])).numpy().tolist() == [0, 1]
    assert hvd.reducescatter(x, op=hvd.Sum).numpy().tolist() == ([3] if rank == 0 else [5])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum) * (rank + 1.0))
    assert tape.gradient(y, x).numpy().tolist() == [3, 3]
    table = tf.Variable(tf.ones((4, 2)))
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        looked_up = tf.reduce_sum(tf.gather(table, [rank, 3]))
    slices = tape.gradient(looked_up, table)
    assert tf.convert_to_tensor(slices).numpy()[:, 0].tolist() == [0.5, 0.5, 0, 1]

    one_row = tf.IndexedSlices(tf.fill((1, 2), rank + 1.0), tf.constant([rank]), tf.constant([4, 2]))
    scaled = hvd.allreduce(one_row, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert tf.convert_to_tensor(scaled).numpy()[:, 0].tolist() == [2, 4, 0, 0]
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(hvd.allreduce(x, op=hvd.Max))
    with pytest.raises(ValueError, match="no gradient for op=Max"):
        tape.gradient(y, x)
    tensorflow_gradients(tf, hvd)
    tensorflow_names(tf, hvd)

    weights, unused = tf.Variable(W + rank), tf.Variable(1.0)
    hvd.broadcast_variables([weights], root_rank=0)

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weights))
        tape = hvd.DistributedGradientTape(tape)
        grad, nothing = tape.gradient(loss, [weights, unused])
        assert nothing is None
        weights.assign_sub(0.1 * grad)
        return hvd.allreduce(loss, name="loss")

    losses = [float(step(tf.constant(own_rows(x, hvd)))) for x in X]
    hvd.shutdown()
    return {"losses": losses, "weights": weights.numpy().tolist()}


def tensorflow_names(tf: Any, hvd: Any) -> None:
    """Ranks as tensors, broadcasts in place, and arguments that Horovod's functions have and these lack."""
    rank = hvd.rank()
    assert [int(op()) for op in (hvd.rank_op, hvd.local_rank_op, hvd.size_op, hvd.local_size_op)] == [rank, rank, 2, 2]
    assert int(hvd.process_set_included_op()) == 1
    for wrap in (lambda call: call, tf.function):
        variables = [tf.Variable([1.0 + rank]), tf.Variable([[3.0 + rank]])]
        returned = wrap(lambda kept=variables: [one.read_value() for one in hvd.broadcast_(kept, 1)])()
        assert [one.numpy().item() for one in variables] == [one.numpy().item() for one in returned] == [2, 4]
    assert hvd.broadcast_object_fn(1, name="fn")({"rank": rank}) == {"rank": 1}
    assert hvd.broadcast_object({"rank": rank}, 1, session=None) == {"rank": 1}
    assert hvd.allreduce(tf.constant([rank]), op=hvd.Sum, device_dense="/cpu:0", ignore_name_scope=True).numpy() == [1]
    for call in (
        lambda: hvd.reducescatter(tf.ones(2), compression=hvd.Compression.fp16),
        lambda: hvd.DistributedGradientTape(tf.GradientTape(), gradient_predivide_factor=2.0),
        lambda: hvd.broadcast_object(1, session=tf),
    ):
        with pytest.raises(ConfigError, match="is not supported by shardwise: "):
            call()


def tensorflow_gradients(tf: Any, hvd: Any) -> None:
    """Those of Horovod (horovod/tensorflow/mpi_ops.py), eagerly and within `tf.function`."""
    rank = hvd.rank()
    counts = [1, 2] if rank == 0 else [2, 1]

    def gradient(call: Any, x: Any, factors: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.add_n([tf.reduce_sum(one * factors) for one in tf.nest.flatten(call(x))]))
        return tape.gradient(y, x)

    x, weights = tf.ones(3), tf.constant([1.0, 2.0, 3.0]) + rank
    pair, two_rows = tf.ones((2 * rank + 2, 1)), tf.ones((2, 1))  # of `pair` 1 row to each rank, and 2
    own_factor = tf.constant([[rank + 1.0]])
    rows, of_rows = tf.ones((rank + 1, 2)), tf.reshape(tf.range(6.0), (3, 2))
    for wrap in (lambda call: call, tf.function):
        result = wrap(lambda: gradient(lambda x: hvd.broadcast(x, 0), x, weights))()
        assert result.numpy().tolist() == ([1.5, 2.5, 3.5] if rank == 0 else [0, 0, 0])
        result = wrap(lambda: gradient(hvd.allgather, rows, of_rows))()
        assert result.numpy().tolist() == ([[0, 1]] if rank == 0 else [[2, 3], [4, 5]])
        result = wrap(lambda: gradient(lambda x: hvd.grouped_allgather([x, 2 * x]), rows, of_rows))()
        assert result.numpy().tolist() == ([[0, 3]] if rank == 0 else [[6, 9], [12, 15]])
        result = wrap(lambda: gradient(lambda x: hvd.alltoall(x, counts)[0], x, weights))()
        assert result.numpy().tolist() == ([1, 2, 3] if rank == 0 else [2, 3, 4])
        result = wrap(lambda: gradient(hvd.alltoall, pair, tf.constant([[1.0], [2.0], [3.0]]) + 10 * rank))()
        assert result.numpy()[:, 0].tolist() == ([1, 11] if rank == 0 else [2, 3, 12, 13])
        for op, factor in ((hvd.Sum, 2), (hvd.Average, 1)):
            scatter = partial(hvd.reducescatter, op=op, prescale_factor=3.0)
            result = wrap(partial(gradient, scatter, two_rows, own_factor))()
            assert result.numpy()[:, 0].tolist() == [3 * factor, 6 * factor]
        result = wrap(lambda: gradient(lambda x: hvd.grouped_reducescatter([x, x], op=hvd.Sum), two_rows, own_factor))()
        assert result.numpy()[:, 0].tolist() == [4, 8]
    received, there = tf.function(lambda: hvd.alltoall(x * (rank + 1), counts))()
    assert received.numpy().tolist() == ([1, 2, 2] if rank == 0 else [1, 1, 2])
    assert there.numpy().tolist() == ([1, 2] if rank == 0 else [2, 1])
    with pytest.raises(ValueError, match="no gradient for op=Max"):
        gradient(lambda x: hvd.reducescatter(x, op=hvd.Max), two_rows, own_factor)


def keras_job(backend: str, folder: str) -> dict[str, Any]:
    os.environ["KERAS_BACKEND"] = backend
    import keras

    install()
    for name in ("horovod.tensorflow.keras.callbacks", "horovod.keras.callbacks"):  # as Horovod's examples import them
        assert importlib.import_module(name).MetricAverageCallback
    import horovod.tensorflow.keras as hvd

    hvd.init()
    rank = hvd.rank()
    assert hvd.reducescatter(np.array([rank, 1.0]), op=hvd.Sum).tolist() == ([1] if rank == 0 else [2])
    with pytest.raises(ConfigError, match=r"DistributedOptimizer\(scale_local_gradients=\) is not supported"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), scale_local_gradients=False)
    check_compression(hvd)
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, use_bias=False)])
    if rank == 0:
        model.set_weights([W])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    assert isinstance(optimizer, keras.optimizers.SGD)
    model.compile(optimizer=optimizer, loss="mean_squared_error")
    rows = np.concatenate([own_rows(x, hvd) for x in X])
    losses: list[float] = []
    history = model.fit(
        rows,
        np.zeros((len(rows), 3), np.float32),
        batch_size=GLOBAL_ROWS // hvd.size(),
        shuffle=False,
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: losses.append(logs["loss"])),
        ],
    )
    assert history.history["loss"]
    weights = model.get_weights()[0]
    assert np.array_equal(hvd.broadcast(weights, 0), weights)
    file = Path(folder) / f"{backend}-{rank}.keras"
    model.save(file)
    loaded = hvd.load_model(file)
    assert type(loaded.optimizer).__name__ == "SGD"
    assert np.array_equal(loaded.get_weights()[0], weights)
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2)  # by batches, then constant
    assert sum_of_rates(hvd, warmup) == pytest.approx(0.25 + 0.3 + 0.35 + 0.4 + 2 * 0.4)
    decay = hvd.callbacks.LearningRateScheduleCallback(0.4, multiplier=0.5, start_epoch=1)
    assert sum_of_rates(hvd, decay) == pytest.approx(2 * 0.1 + 2 * 0.4 + 2 * 0.2)
    hvd.shutdown()
    return {"losses": losses, "weights": weights.tolist()}


def check_compression(hvd: Any) -> None:
    """A third is 1/3 - 8e-5 in fp16, and the variable is updated in its own dtype."""
    import keras

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=hvd.Compression.fp16)
    weights = keras.Variable(np.zeros(2, np.float32))
    optimizer.apply([keras.ops.convert_to_tensor(np.full(2, 1 / 3, np.float32))], [weights])
    assert -np.asarray(keras.ops.convert_to_numpy(weights)) == pytest.approx(np.full(2, float(np.float16(1 / 3))))


def sum_of_rates(hvd: Any, callback: Any) -> float:
    """The sum of learning rates in 3 epochs of 2 steps, from the weights: the gradient is 1/3 in every step."""
    import keras

    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, use_bias=False)])
    model.set_weights([W])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer=optimizer, loss=lambda _, predicted: keras.ops.mean(predicted, axis=-1))
    x, y = np.ones((4, 5), np.float32), np.zeros((4, 3), np.float32)
    model.fit(x, y, batch_size=2, epochs=3, verbose=0, callbacks=[callback])
    changes = 3 * (W - model.get_weights()[0])
    assert np.ptp(changes) < 1e-5
    return float(changes.mean())


def page_job(page: str) -> None:
    """Execute every Python block of a page."""
    blocks = re.findall(r"^```python\n(.*?)^```$", Path(page).read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, page, "exec"), {})
