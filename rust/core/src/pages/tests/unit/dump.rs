//! Dumps and digests of a pool with every kind of state in it.

use super::*;

/// A pool with every kind of state in it.
fn busy() -> PageAllocator {
    let pages = PageAllocator::new(PageConfig {
        cap_low: Some(5),
        ..config(8, 9, 2)
    })
    .unwrap();
    pages.retire(Epoch(4));
    let low = pages.alloc(9, Low, None).unwrap();
    let high = pages.alloc(2, High, None).unwrap();
    pages.pin(&[low[0], low[1], low[1], high[0]]).unwrap();
    pages
        .transfer(&low[2..3], Owner::Request, Owner::Tree)
        .unwrap();
    pages
        .transfer(&low[3..4], Owner::Request, Owner::Copy)
        .unwrap();
    pages.free(&low[1..2], Owner::Request, Epoch(3)).unwrap();
    pages.free(&low[4..6], Owner::Request, Epoch(6)).unwrap();
    pages.free(&high[1..], Owner::Request, Epoch(5)).unwrap();
    pages
}

/// What is wrong, and how to do it.
type Damage = (&'static str, fn(&mut PageDump));

#[test]
fn i16_a_damaged_dump_is_refused() {
    let pages = busy();
    let dump = pages.dump();
    assert_eq!(PageAllocator::restore(&dump).unwrap().dump(), dump);
    let damages: &[Damage] = &[
        ("a row twice", |d| d.pages.push(d.pages[0].clone())),
        ("a row less", |d| d.pages.truncate(1)),
        ("rows turned", |d| d.pages.swap(0, 1)),
        ("a range less", |d| d.free.truncate(0)),
        ("a range cut", |d| {
            let (first, end) = d.free.pop().unwrap();
            d.free.extend([(first, first + 1), (first + 1, end)]);
        }),
        ("a range too long", |d| d.free.last_mut().unwrap().1 += 1),
        ("a page beyond the pool", |d| {
            d.pages.last_mut().unwrap().raw = 8;
        }),
        ("a page that holds nothing", |d| {
            let row = &mut d.pages[0];
            (row.live, row.pending, row.pins) = Default::default();
        }),
        ("live and pending", |d| {
            let start = d.pages[0].live[0].0;
            d.pages[0].pending.insert(0, (start, Epoch(9)));
        }),
        ("a start of no slot", |d| d.pages[0].live[0].0 = 1),
        ("a start beyond the layers", |d| d.pages[0].live[0].0 = 8),
        ("a slot twice", |d| {
            let slot = d.pages[0].live[0];
            d.pages[0].live.insert(0, slot);
        }),
        ("another class", |d| d.pages[0].class = High),
        ("a fence that has passed", |d| d.retired = Epoch(6)),
        ("no pins", |d| d.pages[0].pins[0].1 = 0),
        ("a pin of nobody", |d| {
            let row = d.pages.iter_mut().find(|row| row.pins.is_empty()).unwrap();
            let free = [0, 2, 4, 6].into_iter().find(|start| {
                row.live.iter().all(|slot| slot.0 != *start)
                    && row.pending.iter().all(|slot| slot.0 != *start)
            });
            row.pins.push((free.unwrap(), 1));
        }),
        ("a pin less", |d| d.pages[1].pins.clear()),
        ("no layers", |d| d.config.num_layers = 0),
        ("fewer pages", |d| d.config.num_pages = 4),
        ("a cap beyond the pool", |d| d.config.cap_low = Some(9)),
    ];
    for (name, damage) in damages {
        let mut broken = dump.clone();
        damage(&mut broken);
        assert_ne!(broken, dump, "{name}");
        let error = PageAllocator::restore(&broken).err();
        assert!(
            matches!(error, Some(Error::Config { .. })),
            "{name}: {error:?}"
        );
    }
}

#[test]
fn digests_differ_with_the_state_and_agree_with_the_dump() {
    let steps: &[fn(&PageAllocator)] = &[
        |p| drop(p.alloc(1, Low, None).unwrap()),
        |p| drop(p.alloc(1, High, None).unwrap()),
        |p| p.retire(Epoch(5)),
        |p| p.set_cap(High, 7).unwrap(),
        |p| p.set_cap(Low, 7).unwrap(),
        |p| p.pin(&[p.entry(0, 0, 0, Low).unwrap()]).unwrap(),
        |p| p.unpin(&[p.entry(0, 0, 0, Low).unwrap()]).unwrap(),
        |p| {
            let copy = [p.entry(0, 3, 0, Low).unwrap()];
            p.transfer(&copy, Owner::Copy, Owner::Tree).unwrap();
        },
    ];
    let mut seen = BTreeSet::from([busy().digest()]);
    for step in steps {
        let (pages, twin) = (busy(), busy());
        assert_eq!(pages.digest(), twin.digest());
        step(&pages);
        assert_ne!(pages.dump(), twin.dump());
        assert!(seen.insert(pages.digest()));
    }
}
