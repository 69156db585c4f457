"""The page allocator as plain sets and linear scans: its specification in executable form.

A slot is (raw page, start). `Bad` carries what an error says: its kind, then its numbers.
"""

import copy
from collections import Counter


class Bad(Exception):
    def __init__(self, kind, **numbers):
        super().__init__(kind, numbers)
        self.kind, self.numbers = kind, numbers


class PageModel:
    def __init__(self, shape, addressing, cap_high=None, cap_low=None):
        self.N, self.L, self.P, self.w = shape
        self.addressing = addressing
        self.cap = {"high": self.N if cap_high is None else cap_high}
        self.cap["low"] = self.N // 2 if cap_low is None else cap_low
        self.cls, self.live, self.pending, self.pins, self.retired = {}, {}, {}, {}, 0

    def starts(self, c):
        return [0] if c == "high" else [i * self.w for i in range(self.L // self.w)]

    def rest(self, pages, c):
        slots = {(r, s) for r in pages for s in self.starts(c)}
        return slots - self.live.keys() - self.pending.keys()

    def partial(self, c):
        return self.rest([r for r in self.cls if self.cls[r] == c], c)

    def free_pages(self):
        return [r for r in range(self.N) if r not in self.cls]

    def can_open(self, c):
        used = sum(owner == c for owner in self.cls.values())
        return min(len(self.free_pages()), max(0, self.cap[c] - used))

    def most(self, slots, c):
        count = Counter(s for _, s in slots)
        return max(self.starts(c), key=lambda s: (count[s], -s))

    def capacity(self, slots, c, home):
        if self.addressing == "flat":
            return len(slots) + self.can_open(c) * len(self.starts(c))
        return sum(s == home for _, s in slots) + self.can_open(c)

    def available(self, c):
        return self.capacity(self.partial(c), c, self.most(self.partial(c), c))

    def alloc_many(self, items, c):
        before = copy.deepcopy(self.__dict__)
        partial, fresh, groups = self.partial(c), set(), []
        try:
            for item, (n, start) in enumerate(items):
                groups.append(self.alloc(item, n, start, c, partial, fresh))
        except Bad:
            self.__dict__ = before
            raise
        return groups

    def alloc(self, item, n, start, c, partial, fresh):
        if start is not None and start not in self.starts(c):
            raise Bad("InvalidRequest", field="preferred_start")
        home = self.most(partial | fresh, c) if start is None else start
        free = self.capacity(partial | fresh, c, home)
        if n > free:
            raise Bad("OutOfPages", needed=n, free=free, evictable=0, item=item)
        if n and start is None and not partial | fresh:
            fresh |= self.open(c)
        return [self.take(c, home, partial, fresh) for _ in range(n)]

    def take(self, c, home, partial, fresh):
        pool, start = partial, home
        if any(s == home for _, s in partial):
            step = 1
        elif any(s == home for _, s in fresh):
            pool, step = fresh, 2
        elif self.can_open(c):
            fresh |= self.open(c)
            pool, step = fresh, 3
        elif partial:
            start, step = self.most(partial, c), 4
        else:
            pool, start, step = fresh, self.most(fresh, c), 5
        size = Counter(r for r, _ in partial | fresh)
        slot = min((size[r], r, s) for r, s in pool if s == start)[1:]
        pool.remove(slot)
        self.live[slot] = "request"
        return (*slot, step)

    def open(self, c):
        raw = self.free_pages()[0]
        self.cls[raw] = c
        return self.rest([raw], c)

    def each(self, slots, fault):
        """Raise for the first slot that the class of its page lacks, or that `fault` names."""
        for index, (r, s) in enumerate(slots):
            what = None
            if r >= self.N:
                what = "the pool has no such raw page"
            elif s not in self.starts(self.cls.get(r, "low" if s else "high")):
                what = "the class has no such start"
            if what:
                raise Bad("PageStateError", index=index, page=r, start=s, fault=what)
        for index, (r, s) in enumerate(slots):
            if what := fault(index, (r, s)):
                raise Bad("PageStateError", index=index, page=r, start=s, fault=what)

    def owned(self, slots, owner, movable):
        names = {"request": "a request", "tree": "the tree", "copy": "a copy job"}

        def fault(index, slot):
            if slot not in self.live:
                return "it is not live"
            if slot in slots[:index]:
                return "it is listed twice"
            if self.live[slot] != owner:
                return f"{names[self.live[slot]]} holds it"
            return "a copy job reads it" if movable and slot in self.pins else None

        self.each(slots, fault)

    def free(self, slots, epoch, owner):
        self.owned(slots, owner, movable=False)
        for slot in slots:
            del self.live[slot]
            self.pending[slot] = epoch
        self.sweep()

    def transfer(self, slots, owner, to):
        self.owned(slots, owner, movable=True)
        self.live |= dict.fromkeys(slots, to)

    def pin(self, slots):
        self.each(slots, lambda _, slot: None if slot in self.live else "it is not live")
        self.pins = dict(Counter(self.pins) + Counter(slots))

    def unpin(self, slots):
        def fault(index, slot):
            if self.pins.get(slot, 0) > slots[:index].count(slot):
                return None
            return "it is not live" if slot[0] not in self.cls else "it is not pinned"

        self.each(slots, fault)
        self.pins = dict(Counter(self.pins) - Counter(slots))
        self.sweep()

    def retire(self, epoch):
        self.retired = max(self.retired, epoch)
        self.sweep()

    def sweep(self):
        """Slots that wait for nothing leave; pages that hold nothing are free."""
        waits = self.pending.items()
        self.pending = {s: e for s, e in waits if e > self.retired or s in self.pins}
        held = {r for r, _ in [*self.live, *self.pending]}
        self.cls = {r: c for r, c in self.cls.items() if r in held}

    def set_cap(self, c, cap):
        if cap > self.N:
            raise Bad("ConfigError", field=f"cap_{c}")
        self.cap[c] = cap

    def reclaim_plan(self, k):
        copied = {r for (r, _), owner in self.live.items() if owner == "copy"}
        copied |= {r for r, _ in self.pins}
        live = Counter(r for r, _ in self.live)
        low = [r for r, c in self.cls.items() if c == "low" and r not in copied]
        if k > len(low):
            raise Bad("OutOfPages", needed=k, free=len(low), evictable=0, item=None)
        return sorted(low, key=lambda r: (live[r], r))[:k]

    def dump(self):
        free, ranges = self.free_pages(), []
        for r in free:
            if ranges and ranges[-1][1] == r:
                ranges[-1][1] += 1
            else:
                ranges.append([r, r + 1])

        def of(slots, r):
            return [[s, value] for (page, s), value in sorted(slots.items()) if page == r]

        rows = [
            [r, c, [s for s, _ in of(self.live, r)], of(self.pending, r),
             [owner for _, owner in of(self.live, r)], of(self.pins, r)]
            for r, c in sorted(self.cls.items())
        ]  # fmt: skip
        shape = {"L": self.L, "N": self.N, "P": self.P, "w": self.w}
        head = {"format": 1, **shape, "addressing": self.addressing, "cap": self.cap}
        return {**head, "retired": self.retired, "free": ranges, "pages": rows}
