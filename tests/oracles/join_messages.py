"""Oracle for join_messages and split_messages, on lists. Imports nothing from tf_fusedrec."""


def join_oracle(messages, splits):
    """Returns the joined entries without padding, and the entries of each rank's block."""
    joined, lengths = [], []
    for rank in range(len(splits[0])):
        block = []
        for message, of_message in zip(messages, splits):
            begin = sum(of_message[:rank])
            block += message[begin : begin + of_message[rank]]
        joined += block
        lengths.append(len(block))
    return joined, lengths


def split_oracle(message, splits, segments):
    """Returns [(entries, length of each block)] of each lookup."""
    parts = [([], []) for _ in segments]
    at = 0
    for _ in splits:
        for (entries, lengths), count in zip(parts, segments):
            length = count + sum(message[at : at + count])
            entries += message[at : at + length]
            lengths.append(length)
            at += length
    return parts
