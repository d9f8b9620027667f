"""What simple character models reach on the held-out text of models/shakespeare: nats for each character.

usage: python models/baselines.py TEXT

The text is split as `gpt2 train` splits it: the last tenth, from the next line on. Characters are predicted by their own
frequency, and by 5-grams (four characters before) with Witten-Bell interpolation down to the frequency. Needs Python alone.
"""

import collections
import math
import sys

HELD_OUT = 0.1


def split(path):
    with open(path, "rb") as file:
        data = file.read()
    wanted = int(len(data) * (1 - HELD_OUT))
    cut = data.index(b"\n", wanted) + 1
    return data[:cut].decode(), data[cut:].decode()


class WittenBell:
    """p(c | h) = (count(h c) + kinds(h) p(c | shorter h)) / (count(h) + kinds(h)), and 1 / alphabet at the end."""

    def __init__(self, text, order, alphabet):
        self.order, self.alphabet = order, alphabet
        self.counts = collections.defaultdict(collections.Counter)
        for length in range(order):
            for place in range(length, len(text)):
                self.counts[text[place - length:place]][text[place]] += 1
        self.totals = {history: counter.total() for history, counter in self.counts.items()}

    def probability(self, history, character):
        history = history[max(0, len(history) - self.order + 1):]
        probability = 1 / self.alphabet
        for length in range(len(history) + 1):
            shorter = history[len(history) - length:]
            counter = self.counts.get(shorter)
            if counter is None:
                break
            kinds, total = len(counter), self.totals[shorter]
            probability = (counter[character] + kinds * probability) / (total + kinds)
        return probability

    def loss(self, text):
        before = self.order - 1
        total = sum(math.log(self.probability(text[max(0, place - before):place], text[place])) for place in range(len(text)))
        return -total / len(text)


def main():
    training, held_out = split(sys.argv[1])
    alphabet = len(set(training) | set(held_out))
    print(f"training {len(training)} characters, held out {len(held_out)}, alphabet {alphabet}")
    for name, order in (("character", 1), ("5-gram", 5)):
        print(f"{name}: {WittenBell(training, order, alphabet).loss(held_out):.4f} nats per character")


if __name__ == "__main__":
    main()
