"""Oracle for the ops of user_states, on lists. Imports nothing from tf_fusedrec."""

import dataclasses

STATE_BYTES = 256  # that a state takes beside its pages and the parts of its user


@dataclasses.dataclass
class State:
    tokens: list  # one entry per token
    of_user: object
    used: int
    revision: int


class TooLarge(Exception):
    """The state alone is larger than the cache."""


@dataclasses.dataclass
class StatesOracle:
    """States by (user, version); the one used last is at the end."""

    max_bytes: int
    page_tokens: int
    token_bytes: int
    user_bytes: int
    ttl: int

    def __post_init__(self):
        self.states = {}
        self.counts = dict.fromkeys(["hits", "misses", "writes", "outrun", "evictions", "expirations"], 0)
        self.revision = 0

    def find(self, key, now):
        """Returns the State, or None."""
        self._expire(now)
        self.counts["hits" if key in self.states else "misses"] += 1
        if key in self.states:
            self._use(key, now)
        return self.states.get(key)

    def write(self, key, revision, tokens, of_user, now):
        """Returns whether the write takes effect. A put takes a revision when it begins and when it is there."""
        self._expire(now)
        if revision > 0 and (key not in self.states or self.states[key].revision != revision):
            self.counts["outrun"] += 1
            return False
        if revision == 0:
            self.states.pop(key, None)
        before = [] if revision == 0 else self.states[key].tokens
        state = State([*before, *tokens], of_user, now, 0)
        if self._bytes([state]) > self.max_bytes:
            raise TooLarge
        self.revision += 2 if revision == 0 else 1
        state.revision = self.revision
        self.states[key] = state
        self._use(key, now)
        while self.bytes() > self.max_bytes:
            self.counts["evictions"] += 1
            del self.states[next(iter(self.states))]
        self.counts["writes"] += 1
        return True

    def drop(self, version):
        """Returns the number of states of earlier versions, which leave."""
        left = [key for key in self.states if key[1] < version]
        for key in left:
            del self.states[key]
        return len(left)

    def bytes(self):
        return self._bytes(self.states.values())

    def tokens(self):
        return sum(len(state.tokens) for state in self.states.values())

    def _bytes(self, states):
        pages = sum(-(-len(state.tokens) // self.page_tokens) for state in states)
        return pages * self.page_tokens * self.token_bytes + len(states) * (STATE_BYTES + self.user_bytes)

    def _use(self, key, now):
        self.states[key].used = now
        self.states[key] = self.states.pop(key)

    def _expire(self, now):
        while self.states and self.ttl and now - next(iter(self.states.values())).used > self.ttl:
            self.counts["expirations"] += 1
            del self.states[next(iter(self.states))]
