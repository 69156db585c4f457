//! The worked example of the design, call by call.

use super::*;
use crate::error::Error;
use PriorityClass::{High, Low};

fn pool(addressing: Addressing) -> PageAllocator {
    PageAllocator::new(PageConfig {
        num_pages: 4,
        num_layers: 8,
        page_size: 64,
        slot_widths: 2,
        addressing,
        cap_high: None,
        cap_low: Some(3),
    })
    .unwrap()
}

struct Example(PageAllocator);

impl Example {
    /// Pages, starts and steps of a call, which a call without a trace must give too.
    fn alloc(
        &self,
        n: usize,
        class: PriorityClass,
        start: Option<u32>,
        pages: &[u32],
        starts: &[u32],
        steps: &[u8],
    ) -> Vec<PageEntry> {
        let twin = PageAllocator::restore(&self.0.dump()).unwrap();
        let (entries, traced) = twin.alloc_traced(&[(n, start)], class).unwrap().remove(0);
        assert_eq!(self.0.alloc(n, class, start).unwrap(), entries);
        assert_eq!(self.0.digest(), twin.digest());
        assert_eq!(entries.iter().map(|e| e.raw(4)).collect::<Vec<_>>(), pages);
        assert_eq!(
            entries.iter().map(|e| e.start(4)).collect::<Vec<_>>(),
            starts
        );
        assert!(entries.iter().all(|entry| entry.class() == class));
        assert_eq!(traced, steps);
        entries
    }

    fn free(&self, pages: &[&[PageEntry]]) {
        for pages in pages {
            self.0.free(pages, Owner::Request, Epoch(0)).unwrap();
        }
    }

    /// Free raw pages, partial slots and pending slots after a call, as "r:s" words.
    fn state(&self, free: &[u32], partial: &str, pending: &str) {
        self.0.check().unwrap();
        let dump = self.0.dump();
        let is_free = |raw: &u32| dump.pages.iter().all(|row| row.raw != *raw);
        assert_eq!((0..4).filter(is_free).collect::<Vec<_>>(), free);
        let mut words = (Vec::new(), Vec::new());
        for row in dump.pages.iter().filter(|row| row.class == Low) {
            for start in [0, 2, 4, 6] {
                let word = format!("{}:{start}", row.raw);
                if row.pending.iter().any(|&(s, _)| s == start) {
                    words.1.push(word);
                } else if row.live.iter().all(|&(s, _)| s != start) {
                    words.0.push(word);
                }
            }
        }
        assert_eq!(words.0.join(" "), partial);
        assert_eq!(words.1.join(" "), pending);
    }
}

fn out_of_pages(needed: usize, free: usize) -> Error {
    Error::OutOfPages {
        needed,
        free,
        evictable: 0,
        item: None,
    }
}

#[expect(
    clippy::many_single_char_names,
    reason = "the letters are those of the design"
)]
#[test]
fn worked_example_flat() {
    let x = Example(pool(Addressing::Flat));
    let a = x.alloc(2, Low, None, &[0, 1], &[0, 0], &[2, 3]);
    x.state(&[2, 3], "0:2 0:4 0:6 1:2 1:4 1:6", "");
    let b = x.alloc(2, Low, Some(2), &[0, 1], &[2, 2], &[1, 1]);
    x.state(&[2, 3], "0:4 0:6 1:4 1:6", "");
    let c = x.alloc(3, Low, Some(2), &[2, 0, 0], &[2, 4, 6], &[3, 4, 4]);
    x.state(&[3], "1:4 1:6 2:0 2:4 2:6", "");
    let d = x.alloc(2, Low, Some(0), &[2, 1], &[0, 4], &[1, 4]);
    x.state(&[3], "1:6 2:4 2:6", "");
    assert_eq!(x.0.alloc(4, Low, None).unwrap_err(), out_of_pages(4, 3));
    x.state(&[3], "1:6 2:4 2:6", "");
    assert_eq!(x.0.alloc(2, High, None).unwrap_err(), out_of_pages(2, 1));
    x.state(&[3], "1:6 2:4 2:6", "");
    x.alloc(1, High, None, &[3], &[0], &[2]);
    x.state(&[], "1:6 2:4 2:6", "");
    x.0.free(&c, Owner::Request, Epoch(7)).unwrap();
    x.state(&[], "1:6 2:4 2:6", "0:4 0:6 2:2");
    let e = x.alloc(1, Low, None, &[1], &[6], &[1]);
    x.state(&[], "2:4 2:6", "0:4 0:6 2:2");
    x.0.retire(Epoch(7));
    x.state(&[], "0:4 0:6 2:2 2:4 2:6", "");
    x.free(&[&a, &b, &d, &e]);
    x.state(&[0, 1, 2], "", "");
    assert_eq!(x.0.alloc(13, Low, None).unwrap_err(), out_of_pages(13, 12));
    x.state(&[0, 1, 2], "", "");
    let (pages, starts) = ([0, 1, 2, 0, 0, 0, 1], [4, 4, 4, 0, 2, 6, 0]);
    let f = x.alloc(7, Low, Some(4), &pages, &starts, &[3, 3, 3, 5, 5, 5, 5]);
    x.state(&[], "1:2 1:6 2:0 2:2 2:6", "");
    let g = x.alloc(1, Low, Some(4), &[1], &[2], &[4]);
    x.state(&[], "1:6 2:0 2:2 2:6", "");
    x.free(&[&f, &g]);
    x.state(&[0, 1, 2], "", "");

    let twin = PageAllocator::restore(&x.0.dump()).unwrap();
    let items = [(2, None), (2, Some(2)), (2, Some(6))];
    let traced = twin.alloc_traced(&items, Low).unwrap();
    let steps: Vec<_> = traced.iter().map(|(_, steps)| steps.clone()).collect();
    assert_eq!(steps, [[2, 3], [2, 2], [2, 2]]);
    let pages: Vec<_> = traced.into_iter().map(|(pages, _)| pages).collect();
    assert_eq!(x.0.alloc_many(&items, Low).unwrap(), pages);
    let low = |raw, start| PageEntry::encode(raw, start, Low, 4);
    let expected = [0, 2, 6].map(|start| vec![low(0, start), low(1, start)]);
    assert_eq!(pages, expected);
    x.state(&[2], "0:4 1:4", "");
    let error = x.0.alloc_many(&[(2, Some(4)), (9, Some(0))], Low);
    assert_eq!(error.unwrap_err(), out_of_pages(9, 4).of_item(1));
    x.state(&[2], "0:4 1:4", "");
}

#[test]
fn worked_example_strict() {
    let x = Example(pool(Addressing::Strict));
    x.alloc(3, Low, None, &[0, 1, 2], &[0, 0, 0], &[2, 3, 3]);
    assert_eq!(x.0.alloc(3, Low, Some(0)).unwrap_err(), out_of_pages(3, 0));
    x.alloc(3, Low, Some(2), &[0, 1, 2], &[2, 2, 2], &[1, 1, 1]);
    assert_eq!(x.0.alloc(1, Low, Some(2)).unwrap_err(), out_of_pages(1, 0));
    x.alloc(3, Low, None, &[0, 1, 2], &[4, 4, 4], &[1, 1, 1]);
    x.state(&[3], "0:6 1:6 2:6", "");
}
