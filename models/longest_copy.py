"""How much of generated texts stands word for word in the training text: the longest such passage, in words.

usage: python models/longest_copy.py TEXT SAMPLE...

TEXT is the text of the training, each SAMPLE a file of generated text. Needs Python alone.
"""

import sys


def longest_copy(training, words):
    """The longest run of `words` that is a passage of `training`, itself words joined by single spaces."""
    best = 0
    for start in range(len(words)):
        while start + best < len(words) and f" {' '.join(words[start:start + best + 1])} " in training:
            best += 1
    return best


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        training = f" {' '.join(file.read().split())} "
    for path in sys.argv[2:]:
        with open(path, encoding="utf-8") as file:
            words = file.read().split()
        print(f"{path}: {len(words)} words, the longest copied passage has {longest_copy(training, words)}")


if __name__ == "__main__":
    main()
