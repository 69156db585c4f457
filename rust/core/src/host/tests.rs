#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails by panicking, as a test does"
)]

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn ids(pages: &[HostPage]) -> Vec<u32> {
    pages.iter().map(|page| page.0).collect()
}

fn alloc(pages: &HostPages, n: usize) -> Vec<u32> {
    ids(&pages.alloc(n).unwrap())
}

fn pages(ids: &[u32]) -> Vec<HostPage> {
    ids.iter().copied().map(HostPage).collect()
}

#[test]
fn a_consecutive_run_is_preferred_to_smaller_ids() {
    let pool = HostPages::new(8).unwrap();
    assert_eq!(alloc(&pool, 8), [0, 1, 2, 3, 4, 5, 6, 7]);
    pool.free(&pages(&[6, 1, 4, 5])).unwrap();
    assert_eq!(alloc(&pool, 2), [4, 5]);
    pool.free(&pages(&[3])).unwrap();
    assert_eq!(alloc(&pool, 3), [1, 3, 6], "no run is long enough");
    assert_eq!(pool.alloc(1), None);
    assert_eq!(pool.alloc(0), Some(vec![]));
}

#[test]
fn refused_frees_change_nothing() {
    let pool = HostPages::new(4).unwrap();
    alloc(&pool, 3);
    for bad in [&[0, 3][..], &[1, 4], &[2, 2], &[u32::MAX]] {
        let error = pool.free(&pages(bad)).unwrap_err();
        assert!(matches!(error, Error::HostPageState { .. }), "{bad:?}");
        assert_eq!(pool.dump(), [(3, 1)], "{bad:?}");
    }
    let refused = HostPages::new(u32::MAX);
    assert!(matches!(refused, Err(Error::Config { .. })));
    assert_eq!(HostPages::new(0).unwrap().alloc(1), None);
    assert_eq!(pool.alloc(usize::MAX), None);
}

/// First run of `n` consecutive ids, or else the `n` smallest.
fn expected(free: &BTreeSet<u32>, n: u32) -> Option<Vec<u32>> {
    let run = free
        .iter()
        .find(|&&first| (first..first + n).all(|id| free.contains(&id)));
    match run {
        Some(&first) => Some((first..first + n).collect()),
        None if free.len() < n as usize => None,
        None => Some(free.iter().copied().take(n as usize).collect()),
    }
}

proptest! {
    #[test]
    fn behaves_like_a_set(total in 1u32..70, ops in prop::collection::vec((any::<bool>(), 0u32..12, any::<u64>()), 1..80)) {
        let pool = HostPages::new(total).unwrap();
        let mut free: BTreeSet<u32> = (0..total).collect();
        for (take, n, seed) in ops {
            if take {
                let taken = pool.alloc(n as usize).map(|taken| ids(&taken));
                prop_assert_eq!(&taken, &expected(&free, n));
                for id in taken.unwrap_or_default() {
                    free.remove(&id);
                }
            } else {
                let held: Vec<u32> = (0..total).filter(|id| !free.contains(id)).collect();
                let back: Vec<u32> = held.into_iter().filter(|id| seed >> (id % 64) & 1 == 1).collect();
                pool.free(&pages(&back)).unwrap();
                free.extend(back);
            }
            pool.check().unwrap();
            prop_assert_eq!(pool.free_count(), free.len());
        }
    }
}
