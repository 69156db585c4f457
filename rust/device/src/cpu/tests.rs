//! The CPU device by itself.
#![expect(
    clippy::unwrap_used,
    reason = "a helper of a test fails by panicking, as a test does"
)]
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "test memory is small"
)]

use headrace_core::{HostPage, KvPiece, KvPlane, KvShape, LayerKind, PlanKind, Planes, StateShape};

use super::*;
use crate::clock::Deadline;
use crate::host::HostMemory;
use crate::regions::Region;

const PAGES: u32 = 6;
const TOKENS: u32 = 4;
/// Bytes of a row: those that other engines' batch calls have failed on.
const ROWS: [u64; 6] = [196, 260, 388, 516, 528, 656];
const LONG: Duration = Duration::from_secs(20);

/// One plane per row size, device and host alike.
fn memory(rows: &[u64]) -> Arc<CopyMemory> {
    let shape = KvShape {
        layers: 2,
        pages: PAGES,
        page_tokens: TOKENS,
        host_pages: PAGES,
        host_page_tokens: TOKENS,
    };
    let planes = rows.iter().map(|&token_bytes| KvPlane {
        name: format!("rows of {token_bytes}"),
        token_bytes,
        page_stride: token_bytes * u64::from(TOKENS),
        layer_stride: token_bytes * u64::from(TOKENS * PAGES),
    });
    let layers = vec![LayerKind::Kv(0), LayerKind::Kv(1)];
    let planes = Planes::new(
        shape,
        planes.collect(),
        StateShape::default(),
        vec![],
        layers,
    );
    let planes = planes.unwrap();
    let side = |_| -> Vec<Region> {
        let extents = (0..planes.len()).map(|plane| planes.extent(plane).0);
        extents
            .map(|bytes| HostMemory::new(bytes).unwrap().region())
            .collect()
    };
    let (device, host) = (side(0), side(1));
    Arc::new(CopyMemory::new(planes, device, host).unwrap())
}

fn batch(memory: &Arc<CopyMemory>, job: u64, pages: &[(u32, u32, u32)]) -> LayerCopy {
    let pieces = pages
        .iter()
        .map(|&(device_page, host_page, tokens)| KvPiece {
            device_page,
            device_token: 0,
            host_page: HostPage(host_page),
            tokens,
        });
    let plan = memory
        .planes()
        .plan(PlanKind::Load, pieces.collect(), [].into());
    LayerCopy {
        job,
        memory: memory.clone(),
        plan: Arc::new(plan.unwrap()),
        layer: LayerKind::Kv(1),
        k: 0,
        sums: None,
    }
}

fn join(device: &CpuDevice, ticket: &Ticket) -> Progress {
    let end = Deadline::after(Some(LONG));
    while !device.join(ticket, end.slice(LONG)).unwrap() {
        assert!(!end.slice(LONG).is_zero(), "not over in {LONG:?}");
    }
    device.query(ticket).unwrap()
}

#[expect(unsafe_code, reason = "test memory")]
fn fill(regions: &[Region], value: impl Fn(usize) -> u8) {
    for region in regions {
        let first: *mut u8 = std::ptr::with_exposed_provenance_mut(region.address() as usize);
        for at in 0..region.bytes() as usize {
            // SAFETY: inside the region; nothing is being copied.
            unsafe { first.add(at).write(value(at)) };
        }
    }
}

#[expect(unsafe_code, reason = "test memory")]
fn bytes(regions: &[Region]) -> Vec<Vec<u8>> {
    let read = |region: &Region| {
        let first: *const u8 = std::ptr::with_exposed_provenance(region.address() as usize);
        // SAFETY: inside the region; nothing is being copied.
        (0..region.bytes() as usize)
            .map(|at| unsafe { first.add(at).read() })
            .collect()
    };
    regions.iter().map(read).collect()
}

#[test]
fn every_mechanism_moves_the_same_bytes() {
    let memory = memory(&ROWS);
    let (on_device, on_host) = memory.regions();
    fill(on_host, |at| (at % 251) as u8);
    let copy = batch(&memory, 1, &[(4, 0, 4), (0, 1, 4), (1, 2, 3), (5, 5, 1)]);
    let device = CpuDevice::new(None).unwrap();
    let mut results = Vec::new();
    for how in [Mechanism::Plain, Mechanism::Batch, Mechanism::Gather] {
        fill(on_device, |_| 255);
        device.copy(Stream::Load, how, copy.clone()).unwrap();
        let ticket = device.record(Stream::Load).unwrap();
        assert_eq!(join(&device, &ticket), Progress::Done);
        results.push(bytes(on_device));
    }
    assert_eq!(results[0], results[1]);
    assert_eq!(results[0], results[2]);
    let moved: usize = results[0]
        .iter()
        .flatten()
        .filter(|&&byte| byte != 255)
        .count();
    assert_eq!(moved as u64, copy.bytes());
}

#[test]
fn memory_of_another_space_is_refused_before_anything_is_queued() {
    let real = memory(&[8]);
    let device = CpuDevice::new(None).unwrap();
    let (on_device, _) = real.regions();
    let bytes = on_device[0].bytes();
    let ghost = Region::virtual_at(4096, bytes);
    let mixed = CopyMemory::new(real.planes().clone(), vec![ghost], on_device.to_vec());
    let mixed = Arc::new(mixed.unwrap());
    assert!(device.check(&mixed).is_err());
    let copy = batch(&mixed, 1, &[(0, 0, 1)]);
    assert!(device.copy(Stream::Load, Mechanism::Plain, copy).is_err());
    assert!(device.record(Stream::Compute).is_ok());
    let copy = batch(&real, 1, &[(0, 0, 1)]);
    assert!(
        device
            .copy(Stream::Compute, Mechanism::Plain, copy)
            .is_err()
    );
}

#[test]
fn a_run_that_leaves_its_region_is_an_error_and_not_a_copy() {
    let memory = memory(&[8]);
    let inside = batch(&memory, 1, &[(5, 5, 4)])
        .transfers(Mechanism::Plain)
        .count();
    assert_eq!(inside, 1);
    let run = |host, device, bytes| headrace_core::Run {
        host,
        device,
        bytes,
    };
    let end = memory.regions().0[0].bytes();
    assert!(memory.transfer(0, run(0, 0, end)).is_ok());
    for run in [
        run(1, 0, end),
        run(0, 1, end),
        run(u64::MAX, 0, 1),
        run(0, u64::MAX, 1),
        run(0, 0, u64::MAX),
    ] {
        assert!(memory.transfer(0, run).is_err(), "{run:?}");
    }
    assert!(memory.transfer(1, run(0, 0, 1)).is_err());
}

#[test]
fn streams_wait_for_tickets_and_words_of_one_another() {
    let memory = memory(&[8]);
    let device = CpuDevice::new(None).unwrap();
    let word = device.word().unwrap();
    // The wait is legal before the write is enqueued.
    device.wait_value(Stream::Window, word, 1).unwrap();
    device
        .copy(
            Stream::Window,
            Mechanism::Plain,
            batch(&memory, 1, &[(0, 0, 1)]),
        )
        .unwrap();
    let window = device.record(Stream::Window).unwrap();
    device.wait(Stream::Store, &window).unwrap();
    let store = device.record(Stream::Store).unwrap();
    assert!(!device.join(&store, Duration::from_millis(20)).unwrap());
    assert_eq!(device.query(&window).unwrap(), Progress::Pending);
    device.write_value(Stream::Load, word, 1).unwrap();
    assert_eq!(join(&device, &store), Progress::Done);
    assert_eq!(device.query(&window).unwrap(), Progress::Done);
    assert!(device.write_value(Stream::Load, Word(7), 1).is_err());
}

#[test]
fn an_abandoned_stream_loses_what_runs_and_drops_what_waits() {
    let memory = memory(&[8]);
    let device = CpuDevice::new(None).unwrap();
    device.inject(Stream::Load, 0, Injection::Hang);
    let copy = |job| {
        let batch = batch(&memory, job, &[(0, 0, 1)]);
        device.copy(Stream::Load, Mechanism::Plain, batch).unwrap();
        device.record(Stream::Load).unwrap()
    };
    let (stuck, behind) = (copy(1), copy(2));
    // Until the copy has started, nothing of it is lost.
    while !device.shared.state.lock().lanes[Stream::Load.index()].running {
        std::thread::yield_now();
    }
    device.abandon(Stream::Load);
    assert!(matches!(join(&device, &stuck), Progress::Lost(_)));
    match join(&device, &behind) {
        Progress::Failed(faults) => assert_eq!(faults[0].job, 2),
        other => panic!("{other:?}"),
    }
    let fresh = copy(3);
    assert_eq!(join(&device, &fresh), Progress::Done);
}

#[test]
fn a_capped_link_keeps_to_its_rate_over_many_small_copies() {
    let memory = memory(&[250]);
    let copies = 400;
    let bytes = copies * 250 * u64::from(TOKENS);
    let device = CpuDevice::new(Some(bytes * 4)).unwrap(); // a quarter of a second in all
    let start_ns = monotonic_ns();
    for index in 0..copies {
        // Two streams share the link.
        let stream = [Stream::Load, Stream::Window][usize::try_from(index % 2).unwrap()];
        let page = u32::try_from(index).unwrap() % PAGES;
        let batch = batch(&memory, index, &[(page, page, TOKENS)]);
        device.copy(stream, Mechanism::Plain, batch).unwrap();
    }
    for stream in [Stream::Load, Stream::Window] {
        let last = device.record(stream).unwrap();
        assert_eq!(join(&device, &last), Progress::Done);
    }
    let seconds = (monotonic_ns() - start_ns) as f64 / 1e9;
    // Never faster than the link. How much slower depends on the machine; the benchmark says.
    assert!(seconds >= 0.25, "{seconds}");
}

#[test]
fn a_delayed_copy_starts_late() {
    let memory = memory(&[8]);
    let device = CpuDevice::new(None).unwrap();
    let delay = Duration::from_millis(50);
    device.inject(Stream::Store, 1, Injection::Delay(delay));
    let start_ns = monotonic_ns();
    for job in 0..2 {
        let batch = batch(&memory, job, &[(0, 0, 1)]);
        device.copy(Stream::Store, Mechanism::Plain, batch).unwrap();
    }
    let ticket = device.record(Stream::Store).unwrap();
    assert_eq!(join(&device, &ticket), Progress::Done);
    assert!(u128::from(monotonic_ns() - start_ns) >= delay.as_nanos());
}
