"""Samples tokens from the tiny checkpoint in plain Python, following our sampler's documentation.

Writes sampled_expected.json. An independent implementation: ChaCha8 from its specification, seeded like
rand_core's `seed_from_u64` (PCG32 steps), 53-bit uniform numbers, temperature, top-k, and inverse transform
sampling.
"""

import math
import struct

import torch
import transformers

from reference.common import TINY, save_json

MASK32, MASK64 = 2**32 - 1, 2**64 - 1


def seed_from_u64(state):
    """Returns the 32-byte seed that rand_core expands from 64 bits: eight outputs of PCG32 (XSH-RR)."""
    words = []
    for _ in range(8):
        state = (state * 6364136223846793005 + 11634580027462260723) & MASK64
        xorshifted = (((state >> 18) ^ state) >> 27) & MASK32
        rotation = state >> 59
        words.append(((xorshifted >> rotation) | (xorshifted << (-rotation & 31))) & MASK32)
    return words


def chacha8_block(key, counter):
    """Returns sixteen words of ChaCha with 8 rounds, a 64-bit counter and nonce 0."""

    def rotate(value, bits):
        return ((value << bits) | (value >> (32 - bits))) & MASK32

    start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574, *key, counter & MASK32, counter >> 32, 0, 0]
    x = list(start)

    def quarter(a, b, c, d):
        for first, second, third, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[first] = (x[first] + x[second]) & MASK32
            x[third] = rotate(x[third] ^ x[first], bits)

    for _ in range(4):
        for column in range(4):
            quarter(column, 4 + column, 8 + column, 12 + column)
        for diagonal in range(4):
            quarter(diagonal, 4 + (diagonal + 1) % 4, 8 + (diagonal + 2) % 4, 12 + (diagonal + 3) % 4)
    return [(a + b) & MASK32 for a, b in zip(x, start)]


def uniforms(seed):
    """Yields numbers in [0, 1) from the high 53 bits of two words, the low word first."""
    key, counter = seed_from_u64(seed), 0
    while True:
        words = chacha8_block(key, counter)
        counter += 1
        for low, high in zip(words[::2], words[1::2]):
            yield ((high << 32 | low) >> 11) / 2**53


def draw(logits, temperature, top_k, uniform):
    logits = [struct.unpack("f", struct.pack("f", value / temperature))[0] for value in logits]
    smallest_kept = sorted(logits, reverse=True)[top_k - 1]
    weights = [math.exp(value - max(logits)) if value >= smallest_kept else 0.0 for value in logits]
    total, cumulative = sum(weights), 0.0
    for token, weight in enumerate(weights):
        cumulative += weight / total
        if uniform < cumulative:
            return token
    return max(token for token, weight in enumerate(weights) if weight)


@torch.no_grad()
def export(_):
    model = transformers.GPT2LMHeadModel.from_pretrained(TINY, dtype=torch.float32).eval()
    prompt, ids, random = [289, 221, 299], [], uniforms(42)
    temperature = struct.unpack("f", struct.pack("f", 0.8))[0]
    for _ in range(12):
        logits = model(torch.tensor([prompt + ids])).logits[0, -1].tolist()
        ids.append(draw(logits, temperature, 20, next(random)))
        if ids[-1] == 0:
            break
    save_json("sampled_expected", {"prompt_ids": prompt, "seed": 42, "temperature": 0.8, "top_k": 20, "ids": ids})
