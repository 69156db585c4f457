//! How the next token of a request is chosen, and when generation ends.

use crate::error::{Error, Result};
use crate::request::FinishReason;

/// Sampling options of one request. `Default` is greedy, 128 tokens, no stops.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingSpec {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: i32,
    /// Keep the smallest set of tokens whose probability reaches this; in (0, 1].
    pub top_p: f32,
    /// Keep tokens at least this likely relative to the best one; in [0, 1].
    pub min_p: f32,
    /// Divides (or multiplies, if negative) the logits of tokens seen before; > 0.
    pub repetition_penalty: f32,
    /// Subtracted once from the logits of generated tokens.
    pub presence_penalty: f32,
    /// Subtracted per occurrence from the logits of generated tokens.
    pub frequency_penalty: f32,
    /// Seed of the request's own random numbers.
    pub seed: u64,
    /// How many top log-probabilities to report beside the chosen token; -1 reports none at all.
    pub logprobs: i32,
    /// Tokens to generate at most; at least 1.
    pub max_tokens: u32,
    /// Stop tokens cannot be chosen before this many tokens.
    pub min_tokens: u32,
    /// Any of these ends the request with `stop`; the end-of-sequence token is one of them.
    pub stop_token_ids: Box<[u32]>,
}

impl Default for SamplingSpec {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
            logprobs: -1,
            max_tokens: 128,
            min_tokens: 0,
            stop_token_ids: Box::default(),
        }
    }
}

impl SamplingSpec {
    /// Fails with `InvalidRequest`, which names the first field that is out of range.
    pub fn validate(&self, vocab_size: u32) -> Result<()> {
        check(
            "temperature",
            self.temperature,
            self.temperature >= 0.0,
            "a number >= 0",
        )?;
        check(
            "top_k",
            self.top_k,
            self.top_k >= 0,
            "0 (off) or a count >= 1",
        )?;
        let top_p = self.top_p;
        check(
            "top_p",
            top_p,
            top_p > 0.0 && top_p <= 1.0,
            "a number in (0, 1]",
        )?;
        check(
            "min_p",
            self.min_p,
            (0.0..=1.0).contains(&self.min_p),
            "a number in [0, 1]",
        )?;
        let repetition = self.repetition_penalty;
        check(
            "repetition_penalty",
            repetition,
            repetition > 0.0,
            "a number > 0",
        )?;
        let finite = "a finite number";
        check("presence_penalty", self.presence_penalty, true, finite)?;
        check("frequency_penalty", self.frequency_penalty, true, finite)?;
        check(
            "logprobs",
            self.logprobs,
            self.logprobs >= -1 && i64::from(self.logprobs) <= i64::from(vocab_size),
            "-1 (none) or a count up to the vocabulary size",
        )?;
        check(
            "max_tokens",
            self.max_tokens,
            self.max_tokens >= 1,
            "at least 1",
        )?;
        let fits = self.min_tokens <= self.max_tokens;
        check("min_tokens", self.min_tokens, fits, "at most max_tokens")?;
        if let Some(id) = self.stop_token_ids.iter().find(|&&id| id >= vocab_size) {
            let expected = format!("ids below the vocabulary size {vocab_size}");
            return Err(Error::request("stop_token_ids", id, expected));
        }
        Ok(())
    }

    /// Whether the newest of `generated` is the last token; `stop` says that a stop string ended
    /// with it. A stop wins over a full context.
    pub fn finish_reason(
        &self,
        prompt_len: usize,
        generated: &[u32],
        stop: bool,
        max_context: usize,
    ) -> Option<FinishReason> {
        let last = generated.last()?;
        let may_stop = generated.len() > self.min_tokens as usize;
        if stop || (may_stop && self.stop_token_ids.contains(last)) {
            return Some(FinishReason::Stop);
        }
        self.is_full(prompt_len, generated.len(), max_context)
            .then_some(FinishReason::Length)
    }

    /// Whether a request ends with its `generated`-th token at the latest.
    pub(crate) fn is_full(&self, prompt_len: usize, generated: usize, max_context: usize) -> bool {
        generated >= self.max_tokens as usize || prompt_len + generated >= max_context
    }

    pub(crate) fn needs_history(&self) -> bool {
        (
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
        ) != (1.0, 0.0, 0.0)
    }
}

/// Compared as f64, which holds every f32, i32 and u32; NaN and infinity are out of every range.
fn check(field: &'static str, value: impl Into<f64>, in_range: bool, expected: &str) -> Result<()> {
    let value = value.into();
    if in_range && value.is_finite() {
        return Ok(());
    }
    Err(Error::request(field, value, expected))
}

/// The random number in [0, 1) that draws token `index` of a request with `seed`.
///
/// A function of these two alone (a counter hashed with the `SplitMix64` finaliser of Steele, Lea
/// and Flood, 2014), so a draw does not depend on neighbours, chunks or preemption.
pub fn uniform(seed: u64, index: u64) -> f64 {
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    const ULP: f64 = 1.0 / 9_007_199_254_740_992.0; // 2^-53
    // Hash the seed first: neighbouring seeds must not give shifted copies of one stream.
    let state = mix(seed.wrapping_add(GOLDEN)).wrapping_add(index.wrapping_mul(GOLDEN));
    #[expect(clippy::cast_precision_loss, reason = "53 bits are exact in f64")]
    let mantissa = (mix(state) >> 11) as f64;
    mantissa * ULP
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn draws_are_uniform_and_differ_between_seeds() {
        let mean = |seed| (0..10_000).map(|i| uniform(seed, i)).sum::<f64>() / 10_000.0;
        for seed in [0, 1, 2, u64::MAX] {
            assert!((mean(seed) - 0.5).abs() < 0.02, "seed {seed}");
        }
        let shared = (0..1000).filter(|&i| {
            let draw = uniform(1, i);
            (0..1000).any(|j| draw.to_bits() == uniform(2, j).to_bits())
        });
        assert_eq!(shared.count(), 0);
        assert!((0..10_000).all(|i| (0.0..1.0).contains(&uniform(7, i))));
    }

    type Spoil = fn(&mut SamplingSpec);

    #[test]
    fn out_of_range_fields_are_named() {
        let ok = SamplingSpec::default();
        assert_eq!(ok.validate(10), Ok(()));
        let bad: [(&str, Spoil); 14] = [
            ("temperature", |s| s.temperature = f32::NAN),
            ("temperature", |s| s.temperature = -0.1),
            ("temperature", |s| s.temperature = f32::INFINITY),
            ("top_k", |s| s.top_k = -1),
            ("top_p", |s| s.top_p = 0.0),
            ("top_p", |s| s.top_p = 2.0),
            ("min_p", |s| s.min_p = 1.5),
            ("repetition_penalty", |s| s.repetition_penalty = 0.0),
            ("presence_penalty", |s| s.presence_penalty = f32::NAN),
            ("frequency_penalty", |s| {
                s.frequency_penalty = f32::NEG_INFINITY;
            }),
            ("logprobs", |s| s.logprobs = -2),
            ("max_tokens", |s| s.max_tokens = 0),
            ("min_tokens", |s| s.min_tokens = 200),
            ("stop_token_ids", |s| s.stop_token_ids = Box::new([10])),
        ];
        for (name, spoil) in bad {
            let mut spec = ok.clone();
            spoil(&mut spec);
            match spec.validate(10) {
                Err(Error::InvalidRequest { field, .. }) => assert_eq!(field, name),
                other => panic!("{name}: {other:?}"),
            }
        }
    }
}
