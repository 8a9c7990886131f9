"""What ranks on several hosts run: a sharded model beside the plain one."""

TRAIN = """
    import os, socket, torch, shardwise as sw
    assert os.environ["TOKEN"] == "s3cr3t"
    world = sw.World.join()
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model.load_state_dict(plain.state_dict())
    batches = torch.randn(4, 2, 6, 8)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    engine = sw.shard(model, "zero3", optimizer=torch.optim.AdamW(model.parameters(), lr=0.05), world=world)
    for batch in batches:
        loss = plain(batch.flatten(0, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(engine(batch[world.rank]).square().mean())
        engine.step()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(engine.get(name), parameter.detach())
    said = f"like the plain model on {socket.gethostname()} as rank {world.rank}\\n"
    os.write(1, said.encode())  # at once: what ranks write in pieces, mpirun mixes
    world.close()
"""
