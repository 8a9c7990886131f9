"""One rank of the shortest job there is: meet over gloo, and leave."""

from __future__ import annotations

import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
