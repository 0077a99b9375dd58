"""Run in a process of its own, with TRITON_INTERPRET=1: words and draws of the kernel, as JSON on standard output."""

import json

import torch
import triton
import triton.language as tl

from sordino.mechanisms import device_noise
from sordino.mechanisms.device_noise_kernel import add_normal_by_kernel_, chacha20


@triton.jit
def words_of_blocks(out, k0, k1, k2, k3, k4, k5, k6, k7, first, purpose: tl.constexpr, count: tl.constexpr):
    lane = tl.arange(0, count)
    block = first + lane
    words = chacha20(k0, k1, k2, k3, k4, k5, k6, k7, block.to(tl.int64), purpose, 0)
    for number in tl.static_range(16):
        tl.store(out + number * count + lane, words[number].to(tl.int32, bitcast=True))


def words(key, first, purpose):
    out = torch.zeros(16, 32, dtype=torch.int32)
    words_of_blocks[(1,)](out, *key, first, purpose=purpose, count=32)
    return out


def draws():
    found = []
    rare = device_noise.RARE - 100
    for dtype in (torch.float32, torch.float64):
        for first, count in ((2047, 2), (rare, 300), ((1 << 45) + 1000, 100)):
            ours, theirs = (torch.full((count,), 0.25, dtype=dtype) for _ in range(2))
            add_normal_by_kernel_(ours, device_noise.PUBLIC_KEY, first=first, stddev=1.7)
            device_noise._add_by_operations_(theirs, device_noise.PUBLIC_KEY, first=first, stddev=1.7)
            found.append([str(dtype), first, count, float((ours - theirs).abs().max())])
    return found


def main():
    pairs = []
    generator = torch.Generator().manual_seed(0)
    for first, purpose in ((0, 0), ((1 << 32) - 16, 0), ((9 << 56) + 7, 1), (123456789, 0x4A000000)):
        key = tuple(torch.randint(-(2**31), 2**31, (8,), generator=generator).tolist())
        theirs = device_noise.chacha20_words(key, torch.arange(first, first + 32), nonce=(purpose, 0))
        pairs.append(bool(torch.equal(words(key, first, purpose), theirs)))
    key = tuple(torch.tensor(list(range(32)), dtype=torch.uint8).view(torch.int32).tolist())
    rfc = words(key, (0x09000000 << 32) | 1, 0x4A000000)[:, 0].long() & 0xFFFFFFFF
    print(json.dumps({"words": pairs, "rfc": rfc.tolist(), "draws": draws()}))


if __name__ == "__main__":
    main()
