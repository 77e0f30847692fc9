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
    """States by (user, version), in memory and in a file; the one used last is at the end."""

    max_bytes: int
    page_tokens: int
    token_bytes: int
    user_bytes: int
    ttl: int
    tier_bytes: int = 0  # of the file; 0: none

    def __post_init__(self):
        self.states, self.in_file = {}, {}
        names = ["hits", "misses", "writes", "outrun", "evictions", "expirations", "tier_hits", "tier_evictions"]
        self.counts = dict.fromkeys(names, 0)
        self.revision, self.newest = 0, -1

    def find(self, key, now):
        """Returns the State, or None."""
        self._expire(now)
        self.newest = max(self.newest, key[1])
        if key in self.in_file:
            self.counts["tier_hits"] += 1
            self.states[key] = self.in_file.pop(key)
            self._make_room(arriving=self._bytes([self.states[key]]))
        self.counts["hits" if key in self.states else "misses"] += 1
        if key in self.states:
            self._use(key, now)
        return self.states.get(key)

    def write(self, key, revision, tokens, of_user, now):
        """Returns whether the write takes effect. A put takes a revision when it begins and when it is there."""
        self._expire(now)
        self.newest = max(self.newest, key[1])
        if revision > 0 and (key not in self.states or self.states[key].revision != revision):
            self.counts["outrun"] += 1
            return False
        if revision == 0:
            self.states.pop(key, None)
            self.in_file.pop(key, None)
        before = [] if revision == 0 else self.states[key].tokens
        state = State([*before, *tokens], of_user, now, 0)
        if self._bytes([state]) > self.max_bytes:
            raise TooLarge
        self.revision += 2 if revision == 0 else 1
        state.revision = self.revision
        self.states[key] = state
        self._use(key, now)
        self._make_room()
        self.counts["writes"] += 1
        return True

    def drop(self, version):
        """Returns the number of states of earlier versions, which leave."""
        self.newest = max(self.newest, version)
        left = [(part, key) for part in (self.states, self.in_file) for key in part if key[1] < version]
        for part, key in left:
            del part[key]
        return len(left)

    def bytes(self):
        return self._bytes(self.states.values())

    def bytes_in_file(self):
        return self._bytes(self.in_file.values())

    def tokens(self):
        return sum(len(state.tokens) for state in self.states.values())

    def _bytes(self, states):
        pages = sum(-(-len(state.tokens) // self.page_tokens) for state in states)
        return pages * self.page_tokens * self.token_bytes + len(states) * (STATE_BYTES + self.user_bytes)

    def _use(self, key, now):
        self.states[key].used = now
        self.states[key] = self.states.pop(key)

    def _expire(self, now):
        for part in (self.states, self.in_file):
            while part and self.ttl and now - next(iter(part.values())).used > self.ttl:
                self.counts["expirations"] += 1
                del part[next(iter(part))]

    def _make_room(self, arriving=0):
        """Lets states leave memory. `arriving` bytes of the file hold a state that comes back."""
        while self.bytes() > self.max_bytes:
            self.counts["evictions"] += 1
            key = next(iter(self.states))
            state = self.states.pop(key)
            if self.tier_bytes and key[1] == self.newest:
                self._to_file(key, state, arriving)

    def _to_file(self, key, state, arriving):
        """The states that came first make room. A state that is larger than the file moves none."""
        needed = self._bytes([state])
        while needed <= self.tier_bytes and self.in_file and self.bytes_in_file() + arriving + needed > self.tier_bytes:
            self.counts["tier_evictions"] += 1
            del self.in_file[next(iter(self.in_file))]
        if arriving + needed <= self.tier_bytes:
            self.in_file[key] = state
        else:
            self.counts["tier_evictions"] += 1
