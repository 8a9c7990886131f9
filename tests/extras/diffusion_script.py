"""Scripts of the shape that diffusers' own examples have, on tiny models: a UNet with averaged weights, a DiT, Flux
with LoRA. They know nothing of shardwise.

`diffusion_script.py FOLDER KIND...`: trains, saves on the main process alone, resumes, and writes `KIND.json` and the
trained part as its own library does.
"""

import json
import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from diffusers import (
    AutoencoderKL,
    DDPMPipeline,
    DDPMScheduler,
    DiTTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    UNet2DConditionModel,
)
from diffusers.optimization import get_scheduler
from diffusers.training_utils import (
    EMAModel,
    cast_training_params,
    compute_density_for_timestep_sampling,
    compute_loss_weighting_for_sd3,
    compute_snr,
)
from peft import LoraConfig, set_peft_model_state_dict
from peft.utils import get_peft_model_state_dict
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import CLIPTextConfig, CLIPTextModel

STEPS, SAVED_AT, ACCUMULATE = 10, 5, 2


def unet():
    return UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=4,
    )  # fmt: skip


def frozen():
    text = CLIPTextConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=8, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=8, latent_channels=4)
    return vae.requires_grad_(False), CLIPTextModel(text).requires_grad_(False)


def dit():
    return DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, patch_size=4,
        norm_num_groups=4, num_embeds_ada_norm=10,
    )  # fmt: skip


def flux():
    return FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(2, 2, 4), guidance_embeds=False,
    )  # fmt: skip


class Pictures(torch.utils.data.Dataset):
    def __init__(self):
        random = torch.Generator().manual_seed(5)
        self.pixels = torch.randn(48, 3, 8, 8, generator=random)
        self.ids = torch.randint(2, 32, (48, 8), generator=random)

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        return {"pixel_values": self.pixels[index], "input_ids": self.ids[index]}


class Kind:
    """What one of the scripts trains."""

    def __init__(self, name, accelerator):
        self.name, self.accelerator = name, accelerator
        set_seed(0)
        self.vae, self.text = frozen()
        self.dtype = torch.bfloat16 if name == "flux" else torch.float32
        for one in (self.vae, self.text):
            one.to(accelerator.device, dtype=self.dtype)
        self.model = {"unet": unet, "dit": dit, "flux": flux}[name]()
        self.schedule = FlowMatchEulerDiscreteScheduler() if name == "flux" else DDPMScheduler(num_train_timesteps=50)
        self.ema = None
        if name == "flux":
            self.model.requires_grad_(False)
            self.model.to(accelerator.device, dtype=self.dtype)
            self.model.add_adapter(LoraConfig(r=2, init_lora_weights="gaussian", target_modules=["to_k", "to_q"]))
            cast_training_params([self.model], dtype=torch.float32)
        else:
            self.model.train()
        if name == "unet":
            self.ema = EMAModel(
                self.model.parameters(), decay=0.9, model_cls=type(self.model), model_config=self.model.config
            )
            self.model.enable_gradient_checkpointing()

    def unwrapped(self, model):
        return self.accelerator.unwrap_model(model)

    def save_hook(self, models, weights, folder):
        if self.accelerator.is_main_process:
            if self.ema is not None:
                self.ema.save_pretrained(os.path.join(folder, "ema"))
            for model in models:
                assert isinstance(self.unwrapped(model), type(self.unwrapped(self.model)))
                if self.name == "flux":
                    layers = get_peft_model_state_dict(self.unwrapped(model))
                    FluxPipeline.save_lora_weights(folder, transformer_lora_layers=layers)
                else:
                    self.unwrapped(model).save_pretrained(os.path.join(folder, "model"))
                weights.pop()

    def load_hook(self, models, folder):
        if self.ema is not None:
            loaded = EMAModel.from_pretrained(os.path.join(folder, "ema"), type(self.unwrapped(self.model)))
            self.ema.load_state_dict(loaded.state_dict())
        while models:
            model = self.unwrapped(models.pop())
            if self.name == "flux":
                layers = FluxPipeline.lora_state_dict(folder)
                layers = {key.removeprefix("transformer."): value for key, value in layers.items()}
                wrong = set_peft_model_state_dict(model, layers, adapter_name="default")
                assert not wrong.unexpected_keys
                cast_training_params([model])
            else:
                loaded = type(model).from_pretrained(folder, subfolder="model")
                model.register_to_config(**loaded.config)
                model.load_state_dict(loaded.state_dict())

    def loss(self, model, batch, noise_from):
        latents = (
            self.vae.encode(batch["pixel_values"].to(self.dtype)).latent_dist.mode() * self.vae.config.scaling_factor
        )
        noise = torch.randn(latents.shape, generator=noise_from).to(latents)
        words = self.text(batch["input_ids"], return_dict=False)[0]
        if self.name == "flux":
            return self.flow_loss(model, latents, noise, words, noise_from)
        times = torch.randint(0, 50, (len(latents),), generator=noise_from)
        noisy = self.schedule.add_noise(latents, noise, times)
        if self.name == "dit":
            found = model(noisy, times, class_labels=batch["input_ids"][:, 0] % 10, return_dict=False)[0][:, :4]
            return functional.mse_loss(found.float(), noise.float())
        found = model(noisy, times, words, return_dict=False)[0]
        snr = compute_snr(self.schedule, times)
        weights = torch.stack([snr, 5.0 * torch.ones_like(times)], dim=1).min(dim=1)[0] / snr
        return (
            functional.mse_loss(found.float(), noise.float(), reduction="none").mean(dim=(1, 2, 3)) * weights
        ).mean()

    def flow_loss(self, model, latents, noise, words, noise_from):
        density = compute_density_for_timestep_sampling("none", len(latents), generator=noise_from)
        times = self.schedule.timesteps[(density * self.schedule.config.num_train_timesteps).long()]
        sigmas = (times / self.schedule.config.num_train_timesteps).view(-1, 1, 1, 1).to(latents)
        noisy = ((1.0 - sigmas) * latents + sigmas * noise).flatten(2).transpose(1, 2)
        places = torch.zeros(noisy.shape[1], 3)
        found = model(
            hidden_states=noisy, timestep=times / 1000, pooled_projections=words.mean(1), encoder_hidden_states=words,
            txt_ids=torch.zeros(words.shape[1], 3), img_ids=places, return_dict=False,
        )[0]  # fmt: skip
        target = (noise - latents).flatten(2).transpose(1, 2)
        weighting = compute_loss_weighting_for_sd3("none", sigmas=sigmas).flatten(1, 2)
        return torch.mean(
            (weighting.float() * (found.float() - target.float()) ** 2).reshape(len(target), -1), 1
        ).mean()


def main(name, folder, resume=None):
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, kwargs_handlers=[unused])
    kind = Kind(name, accelerator)
    accelerator.register_save_state_pre_hook(kind.save_hook)
    accelerator.register_load_state_pre_hook(kind.load_hook)
    trained = [param for param in kind.model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained, "lr": 1e-2}], weight_decay=1e-4)
    scheduler = get_scheduler(
        "linear", optimizer, num_warmup_steps=2 * accelerator.num_processes,
        num_training_steps=STEPS * accelerator.num_processes,
    )  # fmt: skip
    batches = DataLoader(Pictures(), batch_size=2, shuffle=False)
    kind.model, optimizer, batches, scheduler = accelerator.prepare(kind.model, optimizer, batches, scheduler)
    model, losses, norms, step = kind.model, [], [], 0
    if resume is not None:
        accelerator.load_state(resume)
        step = int(resume.rsplit("-", 1)[1])
    while step < STEPS:
        if step * ACCUMULATE % len(batches) == 0 or not losses:
            seen = accelerator.skip_first_batches(batches, step * ACCUMULATE % len(batches))
        for number, batch in enumerate(seen, step * ACCUMULATE % len(batches)):
            with accelerator.accumulate(model):
                noise_from = torch.Generator().manual_seed(1000 * step + 10 * number + accelerator.process_index)
                loss = kind.loss(model, batch, noise_from)
                losses.append(accelerator.gather(loss.repeat(2)).mean().item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    to_clip = [param for param in model.parameters() if param.requires_grad]
                    norms.append(float(accelerator.clip_grad_norm_(to_clip, 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                if kind.ema is not None:
                    kind.ema.step(model.parameters())
                step += 1
                saves = name == "dit" or accelerator.is_main_process
                if step == SAVED_AT and resume is None and saves:
                    accelerator.save_state(os.path.join(folder, f"checkpoint-{step}"))
            if step >= STEPS:
                break
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        bare = kind.unwrapped(model)
        target = os.path.join(folder, "trained" if resume is None else "resumed")
        if name == "flux":
            layers = get_peft_model_state_dict(bare)
            FluxPipeline.save_lora_weights(target, transformer_lora_layers=layers)
        else:
            if kind.ema is not None:
                kind.ema.copy_to(bare.parameters())
            DDPMPipeline(unet=bare, scheduler=DDPMScheduler()).save_pretrained(target)
        told = {"losses": losses, "norms": norms, "rate": scheduler.get_last_lr()[0], "step": step}
        with open(os.path.join(folder, "resumed.json" if resume else "trained.json"), "w") as file:
            json.dump(told, file)
    accelerator.free_memory()  # end_training() would leave no process group for the next


for chosen in sys.argv[2:]:
    place = os.path.join(sys.argv[1], chosen)
    os.makedirs(place, exist_ok=True)
    main(chosen, place)
    main(chosen, place, resume=os.path.join(place, f"checkpoint-{SAVED_AT}"))
