//! Single rules, named by the cases they answer (PAG, INT) and the invariants (I).

mod dump;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;

use super::*;
use crate::error::Error;
use PriorityClass::{High, Low};

fn config(num_pages: u32, num_layers: u32, slot_widths: u32) -> PageConfig {
    PageConfig {
        num_pages,
        num_layers,
        page_size: 64,
        slot_widths,
        addressing: Addressing::Flat,
        cap_high: None,
        cap_low: Some(num_pages),
    }
}

fn pool(num_pages: u32, num_layers: u32, slot_widths: u32) -> PageAllocator {
    PageAllocator::new(config(num_pages, num_layers, slot_widths)).unwrap()
}

/// Runs `call`, which must be refused, and returns its error; nothing may have changed.
fn refused<T: std::fmt::Debug>(
    pages: &PageAllocator,
    call: impl FnOnce(&PageAllocator) -> Result<T>,
) -> Error {
    let before = (pages.dump(), pages.stats());
    let error = call(pages).unwrap_err();
    assert_eq!((pages.dump(), pages.stats()), before);
    pages.check().unwrap();
    error
}

fn fault_of(error: &Error) -> (usize, &'static str) {
    match error {
        Error::PageState { index, fault, .. } => (*index, fault),
        other => panic!("{other}"),
    }
}

fn free(pages: &PageAllocator, entries: &[PageEntry]) {
    pages.free(entries, Owner::Request, Epoch(0)).unwrap();
}

fn slots(pages: &PageAllocator, entries: &[PageEntry]) -> Vec<(u32, u32)> {
    let n = pages.config().num_pages;
    entries.iter().map(|e| (e.raw(n), e.start(n))).collect()
}

#[test]
fn pag_02_fallback_order_of_one_call() {
    let pages = pool(2, 8, 2);
    let got = pages.alloc(5, Low, None).unwrap();
    assert_eq!(
        slots(&pages, &got),
        [(0, 0), (1, 0), (0, 2), (0, 4), (0, 6)]
    );
    assert_eq!(pages.stats().low.partial, 3);
}

#[test]
fn pag_04_a_group_that_fails_at_any_item_leaves_nothing() {
    for addressing in [Addressing::Flat, Addressing::Strict] {
        let pages = PageAllocator::new(PageConfig {
            addressing,
            ..config(12, 16, 2)
        })
        .unwrap();
        let held = pages.alloc(5, Low, Some(4)).unwrap();
        free(&pages, &held[..2]);
        let good = [
            (2, None),
            (1, Some(6)),
            (3, Some(0)),
            (0, None),
            (2, Some(14)),
        ];
        for item in 0..=good.len() {
            let mut items = good.to_vec();
            items.insert(item, (1_000, Some(2)));
            let error = refused(&pages, |p| p.alloc_many(&items, Low));
            assert!(
                matches!(error, Error::OutOfPages { needed: 1_000, item: Some(at), .. } if at == item),
                "{error}"
            );
            items[item] = (1, Some(3));
            let error = refused(&pages, |p| p.alloc_many(&items, Low));
            assert!(
                matches!(
                    error,
                    Error::InvalidRequest {
                        field: "preferred_start",
                        ..
                    }
                ),
                "{error}"
            );
        }
        pages.alloc_many(&good, Low).unwrap();
    }
}

#[test]
fn pag_05_a_raw_page_is_free_with_its_last_slot_and_waste_is_never_handed_out() {
    for (layers, width, waste) in [(15, 2, 1), (9, 4, 1), (36, 5, 1), (16, 3, 1), (8, 2, 0)] {
        let pages = pool(2, layers, width);
        assert_eq!(pages.stats().waste_layers, waste);
        let all = pages.available(Low);
        assert_eq!(all, 2 * (layers / width) as usize);
        let got = pages.alloc(all, Low, None).unwrap();
        assert!(slots(&pages, &got).iter().all(|s| s.1 + width <= layers));
        for (left, entry) in (1..=all).rev().zip(&got) {
            assert_eq!(pages.stats().high.used, 0);
            let by_page = got[all - left..].iter().map(|e| e.raw(2));
            let used: BTreeSet<u32> = by_page.collect();
            assert_eq!(pages.stats().free as usize, 2 - used.len());
            refused(&pages, |p| p.alloc(3 - used.len(), High, None));
            free(&pages, &[*entry]);
            conserves_layers(&pages);
        }
        assert_eq!(pages.alloc(2, High, None).unwrap().len(), 2);
    }
}

#[test]
fn pag_06_one_long_request_gains_only_with_flat_addressing() {
    for (addressing, requests, usable) in [
        (Addressing::Strict, 1, 512),
        (Addressing::Flat, 1, 4_096),
        (Addressing::Strict, 8, 4_096),
        (Addressing::Flat, 8, 4_096),
    ] {
        let pages = PageAllocator::new(PageConfig {
            addressing,
            ..config(512, 16, 2)
        })
        .unwrap();
        let mut homes = vec![None; requests];
        let mut got = 0;
        'full: loop {
            for home in &mut homes {
                let Ok(page) = pages.alloc(1, Low, *home) else {
                    break 'full;
                };
                home.get_or_insert(page[0].start(512));
                got += 1;
            }
        }
        assert_eq!(got, usable, "{addressing:?}, {requests} requests");
        pages.check().unwrap();
    }
}

#[test]
fn pag_07_a_refusal_says_what_the_call_could_have_got() {
    let pages = pool(3, 8, 2);
    pages.alloc(2, High, None).unwrap();
    for (n, class, expected) in [(5, Low, 4), (2, High, 1), (usize::MAX, Low, 4)] {
        let error = refused(&pages, |p| p.alloc(n, class, None));
        assert_eq!(error, model::out_of_pages(n, expected));
        assert_eq!(pages.available(class), expected);
    }
    let text = refused(&pages, |p| p.alloc_many(&[(1, None), (9, None)], Low)).to_string();
    assert!(text.contains("item 1: 9 pages needed, 3 free"), "{text}");
}

#[test]
fn pag_08_a_new_tenant_finds_nothing_of_the_old_one() {
    let pages = pool(1, 8, 2);
    let fresh = pages.alloc(2, Low, None).unwrap();
    let expected = pages.dump();
    pages.transfer(&fresh, Owner::Request, Owner::Copy).unwrap();
    pages.transfer(&fresh, Owner::Copy, Owner::Tree).unwrap();
    pages.pin(&fresh).unwrap();
    pages.free(&fresh, Owner::Tree, Epoch(3)).unwrap();
    pages.unpin(&fresh).unwrap();
    pages.retire(Epoch(3));
    let again = pages.alloc(2, Low, None).unwrap();
    let mut dump = pages.dump();
    dump.retired = Epoch(0);
    assert_eq!((again, dump), (fresh, expected));
}

#[test]
fn pag_09_a_freed_page_waits_for_its_step_and_for_its_pins_in_any_order() {
    for pinned in [false, true] {
        for unpin_first in [false, true] {
            let pages = pool(1, 8, 8);
            let page = pages.alloc(1, High, None).unwrap();
            if pinned {
                pages.pin(&page).unwrap();
                pages.pin(&page).unwrap();
                pages.unpin(&page).unwrap();
            }
            pages.free(&page, Owner::Request, Epoch(2)).unwrap();
            let refuse = |pages: &PageAllocator| {
                let error = refused(pages, |p| p.alloc(1, High, None));
                assert_eq!(error, model::out_of_pages(1, 0));
                assert_eq!(pages.stats().high.pending, 1);
            };
            refuse(&pages);
            pages.retire(Epoch(1));
            refuse(&pages);
            if pinned && unpin_first {
                pages.unpin(&page).unwrap();
                refuse(&pages);
            }
            pages.retire(Epoch(2));
            if pinned && !unpin_first {
                refuse(&pages);
                pages.unpin(&page).unwrap();
            }
            assert_eq!(pages.alloc(1, High, None).unwrap(), page);
        }
    }
}

/// PAG-09 as an engine does it: a step frees what the one before it used, and retires late.
#[test]
fn pag_09_pages_of_a_step_in_flight_are_not_issued_again() {
    for delay in [1, 2] {
        let pages = pool(4, 8, 2);
        let mut last_use = std::collections::BTreeMap::new();
        let mut held = Vec::new();
        for step in 1..200 {
            pages.retire(Epoch(step - delay.min(step)));
            let got = pages.alloc(3, Low, None).unwrap();
            for entry in &got {
                if let Some(used) = last_use.insert(*entry, step) {
                    assert!(used + delay <= step, "{entry:?} in steps {used} and {step}");
                }
            }
            pages.free(&held, Owner::Request, Epoch(step - 1)).unwrap();
            held = got;
        }
        assert!(last_use.len() <= 16);
    }
}

#[test]
fn pag_11_emptying_the_pages_of_a_plan_lets_high_in() {
    let pages = pool(4, 8, 2);
    let got = pages.alloc(16, Low, None).unwrap();
    // Slots left: page 0 two, page 1 one, page 2 one held by a copy job, page 3 one pinned.
    let keep = [(0, 0), (0, 4), (1, 2), (2, 2), (3, 6)];
    let entry = |(raw, start)| pages.entry(0, raw, start, Low).unwrap();
    let gone = got.iter().filter(|e| !keep.map(entry).contains(e));
    free(&pages, &gone.copied().collect::<Vec<_>>());
    pages
        .transfer(&[entry((2, 2))], Owner::Request, Owner::Copy)
        .unwrap();
    pages.pin(&[entry((3, 6))]).unwrap();
    assert_eq!(
        refused(&pages, |p| p.alloc(2, High, None)),
        model::out_of_pages(2, 0)
    );
    let before = pages.dump();
    assert!(pages.reclaim_plan(0).unwrap().is_empty());
    assert_eq!(pages.reclaim_plan(1).unwrap(), [1]);
    assert_eq!(pages.reclaim_plan(2).unwrap(), [1, 0]);
    assert_eq!(pages.dump(), before, "a plan changes nothing");
    assert_eq!(
        refused(&pages, |p| p.reclaim_plan(3)),
        model::out_of_pages(3, 2)
    );
    for slot in [(1, 2), (0, 0), (0, 4)] {
        free(&pages, &[entry(slot)]);
    }
    let high = pages.alloc(2, High, None).unwrap();
    assert_eq!(slots(&pages, &high), [(0, 0), (1, 0)]);
}

#[test]
fn i20_pending_slots_count_as_leaving_in_a_plan() {
    let pages = pool(2, 8, 2);
    let got = pages.alloc(2, Low, Some(0)).unwrap();
    pages.free(&got[1..], Owner::Request, Epoch(1)).unwrap();
    assert_eq!(pages.reclaim_plan(2).unwrap(), [1, 0]);
}

#[test]
fn pag_01_a_bad_page_is_named_and_nothing_changes() {
    let pages = pool(4, 8, 2);
    let low = pages.alloc(3, Low, None).unwrap();
    let high = pages.alloc(1, High, None).unwrap();
    pages
        .transfer(&low[2..], Owner::Request, Owner::Tree)
        .unwrap();
    let request = |p: &PageAllocator, list: &[PageEntry]| p.free(list, Owner::Request, Epoch(9));
    let twice = refused(&pages, |p| request(p, &[low[0], high[0], low[0]]));
    assert_eq!(fault_of(&twice), (2, "it is listed twice"));
    let foreign = refused(&pages, |p| request(p, &[low[0], low[2]]));
    assert_eq!(fault_of(&foreign), (1, "the tree holds it"));
    // The raw page of a LOW slot is no HIGH page, a HIGH page no LOW slot.
    for other in [
        PageEntry(low[0].0 ^ 1 << 31),
        PageEntry(high[0].0 ^ 1 << 31),
    ] {
        let error = refused(&pages, |p| request(p, &[low[0], other]));
        assert_eq!(fault_of(&error), (1, "it is not live"));
    }
    for start in [1, 3, 7, 8, 400_000_000] {
        let bad = PageEntry(1 << 31 | (start * 4 + 1));
        let error = refused(&pages, |p| request(p, &[low[0], bad]));
        assert_eq!(fault_of(&error), (1, "the class has no such start"));
        assert!(
            refused(&pages, |p| p.pin(&[bad]))
                .to_string()
                .contains("start")
        );
        assert!(
            refused(&pages, |p| p.unpin(&[bad]))
                .to_string()
                .contains("start")
        );
    }
    request(&pages, &low[..2]).unwrap();
    let again = refused(&pages, |p| request(p, &low[..1]));
    assert_eq!(fault_of(&again), (0, "it is not live"));
    assert_eq!(
        again.to_string(),
        "page 0 start 0 (number 0 of the call): it is not live"
    );
    let pending = refused(&pages, |p| p.pin(&[low[2], low[1]]));
    assert_eq!(fault_of(&pending), (1, "it is not live"));
}

#[test]
fn pinned_pages_are_not_handed_over_and_pins_do_not_overflow() {
    let pages = pool(2, 8, 2);
    let got = pages.alloc(2, Low, None).unwrap();
    pages.pin(&got[1..]).unwrap();
    let moved = refused(&pages, |p| p.transfer(&got, Owner::Request, Owner::Tree));
    assert_eq!(fault_of(&moved), (1, "a copy job reads it"));
    let unpinned = refused(&pages, |p| p.unpin(&[got[1], got[1]]));
    assert_eq!(fault_of(&unpinned), (1, "it is not pinned"));
    pages.table.lock().pins.insert(got[1], u32::MAX);
    let full = refused(&pages, |p| p.pin(&got));
    assert_eq!(fault_of(&full), (1, "it has 2^32 - 1 pins"));
}

#[test]
fn a_lowered_cap_takes_nothing_away_and_opens_nothing() {
    let pages = pool(4, 8, 2);
    let got = pages.alloc(3, Low, Some(0)).unwrap();
    pages.set_cap(Low, 1).unwrap();
    assert_eq!(pages.available(Low), 9, "the slots it has");
    assert_eq!(pages.stats().low.used, 3);
    free(&pages, &got[..2]);
    assert_eq!(pages.available(Low), 3);
    free(&pages, &got[2..]);
    assert_eq!(pages.available(Low), 4);
}

#[test]
fn high_takes_no_start_but_zero() {
    let pages = pool(2, 8, 2);
    pages.alloc(1, High, Some(0)).unwrap();
    let error = refused(&pages, |p| p.alloc(1, High, Some(2)));
    assert!(error.to_string().contains("preferred_start = 2"), "{error}");
}

#[test]
fn int_03_entries_are_a_bijection_below_the_flag() {
    for (num_pages, num_layers, width) in [(1, 1, 1), (3, 15, 2), (7, 36, 5), (24, 64, 1)] {
        let pages = pool(num_pages, num_layers, width);
        let mut seen = BTreeSet::new();
        for class in [High, Low] {
            let starts = match class {
                High => 1,
                Low => num_layers / width,
            };
            for raw in 0..num_pages {
                for start in (0..starts).map(|at| at * width) {
                    let entry = pages.entry(0, raw, start, class).unwrap();
                    assert_eq!(entry.base(), raw + start * num_pages);
                    assert_eq!((entry.raw(num_pages), entry.start(num_pages)), (raw, start));
                    assert_eq!(entry.class(), class);
                    assert!(entry.base() < 1 << 31);
                    assert!(seen.insert(entry));
                }
            }
        }
    }
    let last = pool(1 << 16, 1 << 15, 1 << 10);
    let entry = last.entry(0, (1 << 16) - 1, 31 << 10, Low).unwrap();
    assert_eq!(u64::from(entry.base()), (1 << 16) - 1 + ((31 << 10) << 16));
    let faults = [(1 << 16, 0), (0, 1), (0, 1 << 15), (u32::MAX, u32::MAX)];
    for (raw, start) in faults {
        assert!(last.entry(0, raw, start, Low).is_err());
    }
}

proptest! {
    /// INT-02, INT-03.
    #[test]
    fn int_02_geometry_is_accepted_exactly_within_its_limits(
        num_pages in prop_oneof![0..9u32, 0..300_000u32, any::<u32>()],
        num_layers in prop_oneof![0..9u32, 0..40_000u32, any::<u32>()],
        slot_widths in prop_oneof![0..9u32, 0..3_000u32, any::<u32>()],
        page_size in prop_oneof![Just(0u32), Just(64), Just(1 << 31), any::<u32>()],
    ) {
        let mut config = config(num_pages, num_layers, slot_widths);
        config.page_size = page_size;
        let fields = [num_pages, num_layers, slot_widths].iter().all(|&x| x > 0);
        let starts = num_layers.checked_div(slot_widths).unwrap_or(0);
        let bases = u128::from(num_pages) * u128::from(num_layers);
        // Page states of 64 bytes at most, and two pools of starts^2 bits a page in 64/63 words.
        let per_page = 64 + u128::from(starts) * u128::from(starts) * 2 / 7;
        let small = u128::from(num_pages) * per_page < 3 << 30;
        let legal = fields
            && slot_widths <= num_layers
            && starts <= 64
            && bases <= 1 << 31
            && page_size.is_power_of_two();
        match config.validate() {
            Ok(()) => prop_assert!(legal),
            Err(Error::Config { field, .. }) => {
                prop_assert!(!legal || (field == "num_pages" && !small), "{field}");
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
    }

    /// I14: alloc and free without a fence, in any order and grouping, leave no trace.
    #[test]
    fn i14_alloc_then_free_restores_the_dump(
        before in proptest::collection::vec((0..9usize, any::<bool>()), 0..6),
        n in 0..40usize,
        order in any::<proptest::sample::Selector>(),
        cuts in proptest::collection::vec(1..7usize, 40),
        low in any::<bool>(),
    ) {
        let pages = PageAllocator::new(PageConfig { cap_low: Some(6), ..config(9, 15, 2) }).unwrap();
        for (count, keep_all) in before {
            if let Ok(got) = pages.alloc(count, Low, None) {
                let kept = if keep_all { count } else { count / 2 };
                free(&pages, &got[kept..]);
            }
        }
        let dump = pages.dump();
        let class = if low { Low } else { High };
        let n = n.min(pages.available(class));
        let mut left = pages.alloc(n, class, None).unwrap();
        let mut shuffled = Vec::new();
        while !left.is_empty() {
            let pick = *order.select(&left);
            left.retain(|&entry| entry != pick);
            shuffled.push(pick);
        }
        let mut rest = &shuffled[..];
        for cut in cuts {
            let (now, later) = rest.split_at(cut.min(rest.len()));
            free(&pages, now);
            pages.check().unwrap();
            rest = later;
        }
        free(&pages, rest);
        prop_assert_eq!(pages.dump(), dump);
    }
}

/// PAG-07: what readers see while others allocate and free is a state that existed (I18).
#[test]
fn threads_conserve_pages_and_readers_see_whole_states() {
    let pages = PageAllocator::new(PageConfig {
        cap_low: Some(20),
        ..config(24, 16, 2)
    })
    .unwrap();
    let done = AtomicBool::new(false);
    let work = |seed: usize| {
        let mut held: Vec<PageEntry> = Vec::new();
        for i in 0..3_000 {
            let pick = (i * 7 + seed * 13) % 11;
            let class = if pick < 2 { High } else { Low };
            if pick < 7 {
                held.extend(pages.alloc(pick, class, None).unwrap_or_default());
            } else if held.len() > pick {
                let gone = held.split_off(held.len() - pick);
                pages.pin(&gone[..1]).unwrap();
                let epoch = u64::try_from(i).unwrap();
                pages.free(&gone, Owner::Request, Epoch(epoch)).unwrap();
                pages.unpin(&gone[..1]).unwrap();
                pages.retire(Epoch(epoch.saturating_sub(20)));
            }
        }
        pages.free(&held, Owner::Request, Epoch(0)).unwrap();
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4).map(|seed| scope.spawn(move || work(seed))).collect();
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                conserves_layers(&pages);
                assert!(pages.available(Low) <= 20 * 8 && pages.available(High) <= 24);
            }
        });
        for worker in workers {
            worker.join().unwrap();
        }
        done.store(true, Ordering::Relaxed);
    });
    pages.check().unwrap();
    pages.retire(Epoch(u64::MAX));
    assert_eq!(pages.dump().free, [(0, 24)]);
    assert_eq!(pages.dump().pages, []);
}
