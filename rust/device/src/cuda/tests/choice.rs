//! Which mechanism is chosen, by what was measured.

use super::*;

fn sample(run_bytes: u64, plain_ns: u64, batch_ns: Option<u64>, gather_ns: u64) -> Sample {
    Sample {
        run_bytes,
        plain_ns,
        batch_ns,
        gather_ns,
    }
}

#[test]
fn thresholds_are_where_a_mechanism_pays_at_every_longer_length() {
    let chosen = |samples: &[Sample]| {
        let chosen = measure::choose(samples);
        (chosen.plain_bytes, chosen.batch_bytes)
    };
    let gather = 330;
    // In any order; plain copies are within 5 % of batches at 4 only.
    let samples = [
        sample(4, 350, Some(340), gather),
        sample(1, 5000, Some(2000), gather),
        sample(3, 900, Some(350), gather),
        sample(2, 2000, Some(396), gather),
    ];
    assert_eq!(chosen(&samples), (4, Some(2)));
    // A length at which it does not pay ends the walk down.
    let dip = [samples[0], samples[3], sample(3, 900, Some(800), gather)];
    assert_eq!(chosen(&dip), (4, Some(4)));
    // Without batches a plain copy may cost what a batch might.
    let none = [sample(3, 390, None, gather), sample(2, 400, None, gather)];
    assert_eq!(chosen(&none), (3, None));
    let never = [sample(3, 900, Some(800), gather)];
    assert_eq!(chosen(&never), (32 << 20, None));
    assert_eq!(chosen(&[]), (32 << 20, None));
}

#[test]
fn measured_thresholds_are_remembered_by_gpu_and_driver() {
    let folder = std::env::temp_dir().join(format!("headrace-copies-{}", std::process::id()));
    let make = || {
        let fake = Fake::new(true);
        let cached = Some(folder.clone());
        let mut config = config(&fake);
        (config.thresholds, config.cache) = (None, cached);
        let device = CudaDevice::with_driver(Fake::driver(true), config).unwrap();
        let copied = |call: &Call| matches!(call, Call::Batch(..));
        let measured = fake.take_calls().iter().any(copied);
        (device.thresholds(), measured, fake.pinned().len())
    };
    let (first, measured, pinned) = make();
    assert!(measured);
    let file = measure::file_in(&folder, &("Fake GPU/1".to_owned(), 13_000));
    assert_eq!(file.file_name().unwrap(), "copies-Fake-GPU-1-13000.txt");
    let text = std::fs::read_to_string(&file).unwrap();
    assert_eq!(measure::parse(&text), Some(first));
    assert_eq!(make(), (first, false, pinned));
    std::fs::write(&file, "plain_bytes many\n").unwrap();
    assert!(make().1, "a file that cannot be read is measured again");
    let left: Vec<_> = std::fs::read_dir(&folder).unwrap().collect();
    assert_eq!(left.len(), 1, "no temporary file stays");
    std::fs::remove_dir_all(&folder).unwrap();
    for thresholds in ALL.map(only) {
        let text = measure::format(&thresholds);
        assert_eq!(measure::parse(&text), Some(thresholds));
    }
}
