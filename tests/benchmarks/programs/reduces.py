"""A rank that does nothing but small all_reduces, as fast as they go."""

import marks

marks.mark("user")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

marks.mark("torch")

MANY = 3000


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    numbers = torch.ones(6)
    for count in range(MANY + 200):
        if count == 200:
            marks.mark("begun")
        dist.all_reduce(numbers)
    marks.mark("collective")
    dist.destroy_process_group()
    marks.mark("left")


if __name__ == "__main__":
    main()
