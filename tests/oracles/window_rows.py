"""Oracle for the ops of window_rows, on lists. Imports nothing from tf_fusedrec.

Ids of a piece are given by segment, a message by peer and segment: message[r][s] is a list of ids.
"""


def unique_oracle(pieces):
    """Returns new ids of each piece by segment, the number of each id of each piece, and the last piece by number."""
    number_of, new, numbers, last = {}, [], [], []
    for i, piece in enumerate(pieces):
        new.append([[one for one in ids if (s, one) not in number_of] for s, ids in enumerate(piece)])
        for s, ids in enumerate(new[-1]):
            for one in ids:
                number_of[s, one] = len(number_of)
                last.append(i)
        numbers.append([number_of[s, one] for s, ids in enumerate(piece) for one in ids])
        for number in numbers[-1]:
            last[number] = i
    return new, numbers, last


def rows_oracle(messages):
    """Returns (peer, segment, id) of each row, in the order of arrival."""
    return [
        (r, s, one)
        for message in messages
        for r, block in enumerate(message)
        for s, ids in enumerate(block)
        for one in ids
    ]


def gradients_oracle(rows, last, pieces):
    """Returns for each piece the numbers of the rows whose gradients travel with it. `last` is by number of the row."""
    return [
        sorted((v for v in range(len(rows)) if last[v] == i), key=lambda v: (rows[v][0], rows[v][1], v))
        for i in range(pieces)
    ]


def marks_oracle(rows, last, pieces, peers):
    """Returns the marks of each peer, as blocks."""
    bits = max((pieces - 1).bit_length(), 1)
    blocks = []
    for r in range(peers):
        mine = [last[v] for v in range(len(rows)) if rows[v][0] == r]
        words = []
        for begin in range(0, len(mine), 64 // bits):
            word = sum(mark << bits * k for k, mark in enumerate(mine[begin : begin + 64 // bits]))
            words.append(word - 2**64 if word >= 2**63 else word)
        blocks.append([len(words), *words])
    return blocks
