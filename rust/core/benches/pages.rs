//! Cost of page calls in a pool that is 90 % full after random frees, on one thread.
#![expect(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::cell::RefCell;
use std::time::Duration;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use headrace_core::{
    Addressing, Epoch, Owner, PageAllocator, PageConfig, PageEntry, PriorityClass,
};

const LOW: PriorityClass = PriorityClass::Low;
const LAYERS: u32 = 36;

/// A pool, the pages that are held, and a source of random numbers (xorshift64).
struct Pool {
    pages: PageAllocator,
    held: Vec<PageEntry>,
    width: u32,
    random: u64,
}

impl Pool {
    fn new(num_pages: u32, width: u32) -> Self {
        let pages = PageAllocator::new(PageConfig {
            num_pages,
            num_layers: LAYERS,
            page_size: 64,
            slot_widths: width,
            addressing: Addressing::Flat,
            cap_high: None,
            cap_low: Some(num_pages),
        });
        let pages = pages.unwrap();
        let held = pages.alloc(pages.available(LOW), LOW, None).unwrap();
        let random = 1;
        let mut pool = Self {
            pages,
            held,
            width,
            random,
        };
        let tenth = pool.held.len() / 10;
        let gone = pool.pick(tenth);
        pool.free(&gone);
        pool
    }

    fn below(&mut self, n: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random >> 8).unwrap() % n
    }

    fn pick(&mut self, n: usize) -> Vec<PageEntry> {
        let mut next = || {
            let at = self.below(self.held.len());
            self.held.swap_remove(at)
        };
        (0..n).map(|_| next()).collect()
    }

    fn home(&mut self) -> u32 {
        let start = self.below((LAYERS / self.width) as usize);
        u32::try_from(start).unwrap() * self.width
    }

    fn free(&self, gone: &[PageEntry]) {
        self.pages.free(gone, Owner::Request, Epoch(0)).unwrap();
    }
}

/// Alloc and free by pages a call, size of the pool and width of a window.
fn calls(c: &mut Criterion) {
    let cases = [
        (1_000, 65_536, 2),
        (32, 65_536, 2),
        (1_000, 4_096, 2),
        (1_000, 262_144, 2),
        (1_000, 65_536, 9),
        (1_000, 65_536, 1),
    ];
    for (n, num_pages, width) in cases {
        let pool = RefCell::new(Pool::new(num_pages, width));
        let mut group = c.benchmark_group(format!("{n} pages a call"));
        group.throughput(Throughput::Elements(n as u64));
        let shape = format!("N={num_pages}, w={width}");
        group.bench_function(BenchmarkId::new("alloc", &shape), |b| {
            let balance = || {
                let mut pool = pool.borrow_mut();
                if pool.pages.available(LOW) < pool.held.len() / 9 {
                    let gone = pool.pick(n);
                    pool.free(&gone);
                }
                pool.home()
            };
            let alloc = |home| {
                let mut pool = pool.borrow_mut();
                let got = pool.pages.alloc(n, LOW, Some(home)).unwrap();
                pool.held.extend(got);
            };
            b.iter_batched(balance, alloc, BatchSize::PerIteration);
        });
        group.bench_function(BenchmarkId::new("free", &shape), |b| {
            let refill = || {
                let mut pool = pool.borrow_mut();
                let home = pool.home();
                let got = pool.pages.alloc(n, LOW, Some(home)).unwrap();
                pool.held.extend(got);
                pool.pick(n)
            };
            let free = |gone: Vec<PageEntry>| pool.borrow().free(&gone);
            b.iter_batched(refill, free, BatchSize::PerIteration);
        });
        group.finish();
    }
}

/// Into an empty pool: every page of the call opens a raw page.
fn open(c: &mut Criterion) {
    let mut group = c.benchmark_group("1000 pages into an empty pool");
    group.throughput(Throughput::Elements(1_000));
    for (name, class) in [("high", PriorityClass::High), ("low", LOW)] {
        let mut pool = Pool::new(65_536, 2);
        let held = std::mem::take(&mut pool.held);
        pool.free(&held);
        group.bench_function(name, |b| {
            let mut got = Vec::new();
            b.iter(|| {
                got = pool.pages.alloc(1_000, class, Some(0)).unwrap();
                pool.free(&got);
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = calls, open
}
criterion_main!(benches);
