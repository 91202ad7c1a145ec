"""Run by test_gpu_triton.py with Triton's interpreter on: the write that rotates, and lost NaNs.

The cases are the GPU's own (gpu/check_write.py), with fewer tokens and heads, as the interpreter is
slow, and in float16: where the GPU rounds to bfloat16, it cuts off.
"""

from dataclasses import replace

import torch

from kernels_patch.gpu import check_write


def main() -> None:
    for case in check_write.rope_cases():
        single = case.angle_dtype == torch.float32
        small = replace(
            case,
            n_tokens=min(case.n_tokens, 5 if case.tuning is None else 17),
            heads=3,
            kv_heads=2,
            dtype=torch.float16,
            angle_dtype=torch.float32 if single else torch.float16,
        )
        assert check_write.rope_differences(small, "cpu") == 0, small
    nans = [case for case in check_write.write_cases() if case.data == "nan"]
    assert nans
    for case in nans:
        assert check_write.write_differences(case, "cpu") == 0, case
    print("interpreted")


if __name__ == "__main__":
    main()
