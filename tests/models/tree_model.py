"""The prefix tree as its documentation tells it: a dict from a prefix to where its last page is.

A prefix is a tuple of page numbers after its namespace. Nodes and splits do not exist here;
everything is found by scanning all pages.
"""

from dataclasses import dataclass, field

RESIDENT = ("full", "loading", "backing")
READABLE = ("full", "backing")


@dataclass
class Page:
    state: str
    device: int | None = None
    host: int | None = None
    priority: str = "high"
    tick: int = 0
    snapshot: int | None = None
    snapshot_tick: int = 0
    job: int | None = None


@dataclass
class Hold:
    path: tuple
    reader: str
    windows: bool = False
    snapshot: tuple | None = None


@dataclass
class TreeModel:
    """Policies `write_through` and `none`: what `write_back` does is modelled in Rust."""

    page_size: int
    snapshots: bool
    pages: dict = field(default_factory=dict)
    holds: dict = field(default_factory=dict)
    jobs: dict = field(default_factory=dict)  # id -> (last path, paths)
    tick: int = 0

    def steps(self, path):
        return [path[:n] for n in range(2, len(path) + 1)]

    def locks(self, path):
        def below(end):
            return end[: len(path)] == path

        holds = [hold for hold in self.holds.values() if below(hold.path)]
        return [
            sum(hold.reader == "high" for hold in holds),
            sum(hold.reader == "low" for hold in holds),
            sum(below(end) for end, _ in self.jobs.values()),
            sum(hold.windows for hold in holds),
        ]

    def locked(self, path):
        return any(self.locks(path)[:3])

    def snapshot_locked(self, path):
        return any(hold.snapshot == path for hold in self.holds.values())

    def children(self, path):
        below = [p for p in self.pages if len(p) == len(path) + 1 and p[:-1] == path]
        return [self.pages[p] for p in below]

    def useful(self, path):
        below = (p for p in self.pages if p[: len(path)] == path)
        return not self.snapshots or any(self.pages[p].snapshot is not None for p in below)

    def hit(self, path, most):
        """(pages of the longest match, path of its snapshot)."""
        unit = max(1, 64 // self.page_size)
        known = 0
        for step in self.steps(path):
            if step not in self.pages:
                break
            known += 1
        len_pages = min(known, most) // unit * unit
        if not self.snapshots:
            return len_pages, None
        for step in reversed(self.steps(path[: len_pages + 1])):
            if self.pages[step].snapshot is not None:
                return len(step) - 1, step
        return 0, None

    def match(self, key, path, most, reader):
        self.tick += 1
        len_pages, snapshot = self.hit(path, most)
        for step in self.steps(path[: len_pages + 1]):
            self.pages[step].tick = self.tick
        if snapshot:
            self.pages[snapshot].snapshot_tick = self.tick
        self.holds[key] = Hold(path[: len_pages + 1], reader, snapshot=snapshot)

    def release(self, key):
        """LOW pages that nobody reads any more."""
        del self.holds[key]
        return self.drop_windows()

    def drop_windows(self):
        unread = [p for p, page in self.pages.items() if page.state == "low"]
        garbage = []
        for path in unread:
            if self.locks(path)[3] == 0:
                garbage.append(self.pages[path].device)
                self.pages[path].state, self.pages[path].device = "host", None
        return garbage

    def insert(self, key, suffix, given, priority):
        """(covered, duplicates, LOW pages replaced)."""
        path = self.holds[key].path
        if len(path) > 1 and self.pages[path].state not in READABLE:
            return 0, [], []
        self.tick += 1
        covered, duplicates, garbage = 0, [], []
        for index, (number, own) in enumerate(zip(suffix, given, strict=True)):
            step = (*path, number)
            page = self.pages.get(step)
            if page is None:
                page = self.pages[step] = Page("full", own, priority=priority)
            elif page.state == "loading":
                break
            elif page.state in READABLE:
                duplicates.append((index, own, page.device))
            else:
                garbage += [page.device] if page.state == "low" else []
                page.state, page.device = "full", own
            page.tick = self.tick
            page.priority = min(page.priority, priority)  # "high" sorts before "low"
            path = step
            covered += 1
        self.holds[key].path = path
        return covered, duplicates, garbage

    def run(self, key, state):
        """Pages of a hold after its device part that are in `state`."""
        steps = self.steps(self.holds[key].path)
        while steps and self.pages[steps[0]].state in READABLE:
            steps.pop(0)
        run = []
        while steps and self.pages[steps[0]].state == state:
            run.append(steps.pop(0))
        return run

    def remove(self, path, out):
        for gone in [p for p in self.pages if p[: len(path)] == path]:
            page = self.pages.pop(gone)
            out["device"] += [page.device] if page.device is not None else []
            out["host"] += [page.host] if page.host is not None else []
            out["snapshots"] += [page.snapshot] if page.snapshot is not None else []

    def evict_device(self, n):
        out = {"device": [], "host": [], "snapshots": [], "coming": 0}
        for _ in range(n):
            frontier = [
                (self.useful(path), page.priority == "high", page.tick, path)
                for path, page in self.pages.items()
                if page.state == "full"
                and not self.locked(path)
                and not any(child.state in RESIDENT for child in self.children(path))
            ]
            if not frontier:
                break
            path = min(frontier)[-1]
            page = self.pages[path]
            if page.host is None:
                self.remove(path, out)
            else:
                out["device"].append(page.device)
                page.state, page.device = "host", None
        return out

    def evict_host(self, n):
        out = {"device": [], "host": [], "snapshots": [], "coming": 0}
        for _ in range(n):
            frontier = [
                (self.useful(path), page.state == "host", page.priority == "high", page.tick, path)
                for path, page in self.pages.items()
                if page.state in ("full", "host")
                and page.host is not None
                and not self.locked(path)
                and not any(child.host is not None for child in self.children(path))
            ]
            if not frontier:
                break
            path = min(frontier)[-1]
            if self.pages[path].state == "host":
                self.remove(path, out)
            else:
                out["host"].append(self.pages[path].host)
                self.pages[path].host = None
        return out

    def evict_snapshot(self, n):
        slots = []
        for _ in range(n):
            free = [
                (page.snapshot_tick, path)
                for path, page in self.pages.items()
                if page.snapshot is not None and not self.snapshot_locked(path)
            ]
            if not free:
                break
            page = self.pages[min(free)[-1]]
            slots.append(page.snapshot)
            page.snapshot = None
        return slots

    def demote(self, key):
        freed = []
        for path in reversed(self.steps(self.holds[key].path)):
            page = self.pages[path]
            if page.state not in RESIDENT:
                continue
            high, _, jobs, _ = self.locks(path)
            below = any(child.state in RESIDENT for child in self.children(path))
            if page.state != "full" or page.host is None or high or jobs or below:
                break
            freed.append(page.device)
            page.state, page.device = "host", None
        return freed
