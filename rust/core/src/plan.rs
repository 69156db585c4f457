//! Step plans: everything a forward needs to know, as flat arrays.
//!
//! Rows: decode rows first, then prefill segments, each group in the scheduler's order (arrival
//! under FCFS). The arrays are laid out for the runner: `tokens` are the concatenated inputs of all
//! rows, `token_offsets` their borders. A plan that was formed before the tokens of the step before
//! it were known names the rows they come from (`token_sources`). No lock, no state.

use crate::ids::{Epoch, RequestId, SlotId};
use crate::memory::StepCopies;
use crate::pages::PageEntry;
use crate::sampling::{SamplingSpec, uniform};

/// What one step will do. Built once, then only read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepPlan {
    /// Number of this step.
    pub epoch: Epoch,
    /// The first this many rows are decode rows of one token; the rest are prefill segments.
    pub num_decode: usize,
    /// Request of each row. `[rows]`
    pub request_ids: Vec<u64>,
    /// Slot of each row. `[rows]`
    pub slots: Vec<i64>,
    /// Tokens already in the slot = position of the row's first token. `[rows]`
    pub starts: Vec<i64>,
    /// Borders of the rows in the token arrays. `[rows + 1]`
    pub token_offsets: Vec<i64>,
    /// Input tokens of all rows. `[tokens]`
    pub token_ids: Vec<i64>,
    /// Sampled row of the step before whose token is the input (`token_ids` is 0 then), or -1.
    /// `[tokens]`
    pub token_sources: Vec<i64>,
    /// Absolute position of each token. `[tokens]`
    pub positions: Vec<i64>,
    /// Slot each token's request has. `[tokens]`
    pub token_slots: Vec<i64>,
    /// Block-table entries of all rows, one after the other.
    pub block_tables: Vec<u32>,
    /// Borders of the rows in `block_tables`. `[rows + 1]`
    pub table_offsets: Vec<i64>,
    /// HIGH page each token is written to. `[tokens]`
    pub token_pages: Vec<i64>,
    /// Running number of the first layer that the LOW rows stream.
    pub stream_k0: u64,
    /// (slot, staging buffer): states to copy aside after the step.
    pub snapshots: Vec<(u32, u32)>,
    /// Copies whose gates the step passes.
    pub copies: StepCopies,
    /// Rows whose next token is sampled. `[samples]`
    pub sample_rows: Vec<i64>,
    /// Index of their last token in the token arrays. `[samples]`
    pub sample_index: Vec<i64>,
    /// How to sample them.
    pub sampling: SamplingRows,
}

/// Sampling options of the sampled rows, one entry each; see [`SamplingSpec`] for the meaning.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingRows {
    /// `[samples]`
    pub temperature: Vec<f32>,
    /// `[samples]`, 0 is off
    pub top_k: Vec<i32>,
    /// `[samples]`
    pub top_p: Vec<f32>,
    /// `[samples]`
    pub min_p: Vec<f32>,
    /// `[samples]`
    pub repetition_penalty: Vec<f32>,
    /// `[samples]`
    pub presence_penalty: Vec<f32>,
    /// `[samples]`
    pub frequency_penalty: Vec<f32>,
    /// The draw of each row, in [0, 1). `[samples]`
    pub uniform: Vec<f64>,
    /// `[samples]`, -1 is none
    pub logprobs: Vec<i32>,
    /// Prompt then generated tokens of rows with penalties; empty ranges for the others.
    pub history_tokens: Vec<i64>,
    /// `[samples + 1]`
    pub history_offsets: Vec<i64>,
    /// Prompt part of each history. `[samples]`
    pub history_prompt_lens: Vec<i64>,
    /// Tokens that may not be chosen (stop tokens before `min_tokens`).
    pub banned_tokens: Vec<i64>,
    /// `[samples + 1]`
    pub banned_offsets: Vec<i64>,
}

/// One row to add to a plan.
#[derive(Clone, Copy)]
pub struct RowInput<'a> {
    /// Request of the row.
    pub request: RequestId,
    /// Its slot.
    pub slot: SlotId,
    /// Tokens already in the slot.
    pub start: usize,
    /// Tokens to compute; a decode row has one.
    pub tokens: &'a [u32],
    /// Sampled row of the step before that gives the one token of a decode row; `tokens` is 0 then.
    pub source: Option<usize>,
    /// Its block table, which covers all tokens up to the last of `tokens`.
    pub table: &'a [u32],
    /// Tokens per entry of the table.
    pub table_tokens: usize,
    /// How to sample the row's next token, if it is wanted.
    pub sample: Option<SampleInput<'a>>,
}

/// What sampling a row needs to know of its request.
#[derive(Clone, Copy)]
pub struct SampleInput<'a> {
    /// Options.
    pub spec: &'a SamplingSpec,
    /// Whole prompt.
    pub prompt: &'a [u32],
    /// Tokens generated so far.
    pub generated: &'a [u32],
    /// Tokens that are generated after these and before the one to sample, but not known yet. With
    /// any, a row whose options need its history cannot be sampled.
    pub awaited: usize,
}

/// Width of the decode part of a forward for `rows` rows: 0, 1, 2, 4, 8, then multiples of 8.
pub fn decode_width(rows: usize) -> usize {
    match rows {
        0..=2 => rows,
        3..=8 => rows.next_power_of_two(),
        _ => rows.next_multiple_of(8),
    }
}

/// Collects rows into a [`StepPlan`]: all decode rows first, then the prefill segments.
pub struct PlanBuilder {
    plan: StepPlan,
}

impl PlanBuilder {
    /// An empty plan of step `epoch`.
    pub fn new(epoch: Epoch) -> Self {
        let mut plan = StepPlan {
            epoch,
            ..StepPlan::default()
        };
        plan.token_offsets.push(0);
        plan.table_offsets.push(0);
        plan.sampling.history_offsets.push(0);
        plan.sampling.banned_offsets.push(0);
        Self { plan }
    }

    /// Adds a decode row. All decode rows come before the first prefill segment.
    pub fn push_decode(&mut self, row: RowInput<'_>) {
        debug_assert_eq!(self.plan.num_decode, self.plan.request_ids.len());
        debug_assert_eq!(row.tokens.len(), 1);
        self.plan.num_decode += 1;
        self.push(row);
    }

    /// Adds a prefill segment.
    pub fn push_prefill(&mut self, row: RowInput<'_>) {
        self.push(row);
    }

    /// What the step copies beside the rows.
    pub fn set_copies(&mut self, copies: StepCopies, stream_k0: u64, snapshots: Vec<(u32, u32)>) {
        self.plan.copies = copies;
        self.plan.stream_k0 = stream_k0;
        self.plan.snapshots = snapshots;
    }

    /// The plan.
    pub fn finish(self) -> StepPlan {
        self.plan
    }

    fn push(&mut self, row: RowInput<'_>) {
        let plan = &mut self.plan;
        let slot = i64::from(row.slot.index());
        let start = to_i64(row.start);
        let row_index = to_i64(plan.request_ids.len());
        plan.request_ids.push(row.request.0);
        plan.slots.push(slot);
        plan.starts.push(start);
        for (position, &token) in (start..).zip(row.tokens) {
            plan.token_ids.push(i64::from(token));
            plan.token_sources.push(row.source.map_or(-1, to_i64));
            plan.positions.push(position);
            plan.token_slots.push(slot);
        }
        let pages = (row.start..row.start + row.tokens.len()).map(|position| {
            let entry = row.table.get(position / row.table_tokens);
            debug_assert!(entry.is_some_and(|&entry| !PageEntry(entry).is_low()));
            entry.map_or(-1, |&entry| i64::from(PageEntry(entry).base()))
        });
        plan.token_pages.extend(pages);
        plan.block_tables.extend_from_slice(row.table);
        plan.table_offsets.push(to_i64(plan.block_tables.len()));
        let end = to_i64(plan.token_ids.len());
        plan.token_offsets.push(end);
        if let Some(sample) = row.sample {
            plan.sample_rows.push(row_index);
            plan.sample_index.push(end - 1);
            plan.sampling.push(sample);
        }
    }
}

impl SamplingRows {
    fn push(&mut self, sample: SampleInput<'_>) {
        let spec = sample.spec;
        let generated = sample.generated.len() + sample.awaited;
        self.temperature.push(spec.temperature);
        self.top_k.push(spec.top_k);
        self.top_p.push(spec.top_p);
        self.min_p.push(spec.min_p);
        self.repetition_penalty.push(spec.repetition_penalty);
        self.presence_penalty.push(spec.presence_penalty);
        self.frequency_penalty.push(spec.frequency_penalty);
        self.uniform.push(uniform(spec.seed, generated as u64));
        self.logprobs.push(spec.logprobs);
        let history = spec.needs_history();
        debug_assert!(!history || sample.awaited == 0, "its history is not known");
        if history {
            let tokens = sample.prompt.iter().chain(sample.generated);
            self.history_tokens.extend(tokens.map(|&t| i64::from(t)));
        }
        self.history_prompt_lens.push(if history {
            to_i64(sample.prompt.len())
        } else {
            0
        });
        self.history_offsets.push(to_i64(self.history_tokens.len()));
        let banned = generated < spec.min_tokens as usize && !spec.stop_token_ids.is_empty();
        if banned {
            self.banned_tokens
                .extend(spec.stop_token_ids.iter().map(|&t| i64::from(t)));
        }
        self.banned_offsets.push(to_i64(self.banned_tokens.len()));
    }
}

/// Token counts are bounded by memory, far below 2^63.
fn to_i64(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn widths_are_1_2_4_8_then_multiples_of_8() {
        let expected = [0, 1, 2, 4, 4, 8, 8, 8, 8, 16, 16];
        for (rows, width) in expected.into_iter().enumerate() {
            assert_eq!(decode_width(rows), width, "{rows} rows");
        }
        assert_eq!(decode_width(255), 256);
    }

    #[test]
    fn arrays_describe_the_rows() {
        let spec = SamplingSpec {
            presence_penalty: 0.5,
            min_tokens: 3,
            stop_token_ids: Box::new([7]),
            ..SamplingSpec::default()
        };
        let slot = |i| SlotId::new(i).unwrap();
        let mut builder = PlanBuilder::new(Epoch(4));
        builder.push_decode(RowInput {
            request: RequestId(10),
            slot: slot(2),
            start: 5,
            tokens: &[9],
            source: None,
            table: &[2],
            table_tokens: 100,
            sample: Some(SampleInput {
                spec: &spec,
                prompt: &[1, 2],
                generated: &[9],
                awaited: 0,
            }),
        });
        builder.push_prefill(RowInput {
            request: RequestId(11),
            slot: slot(0),
            start: 64,
            tokens: &[3, 4, 5],
            source: None,
            table: &[7, 9],
            table_tokens: 64,
            sample: None,
        });
        let plan = builder.finish();
        assert_eq!(plan.num_decode, 1);
        assert_eq!(plan.request_ids, [10, 11]);
        assert_eq!(plan.token_offsets, [0, 1, 4]);
        assert_eq!(plan.positions, [5, 64, 65, 66]);
        assert_eq!(plan.token_slots, [2, 0, 0, 0]);
        assert_eq!(plan.token_sources, [-1; 4]);
        assert_eq!(plan.token_pages, [2, 9, 9, 9]);
        assert_eq!(
            (plan.block_tables, plan.table_offsets),
            (vec![2, 7, 9], vec![0, 1, 3])
        );
        assert_eq!((plan.sample_rows, plan.sample_index), (vec![0], vec![0]));
        assert_eq!(plan.sampling.history_tokens, [1, 2, 9]);
        assert_eq!(plan.sampling.history_prompt_lens, [2]);
        assert_eq!(plan.sampling.banned_tokens, [7]);
    }

    /// What a row has beside its token is the same whether the token before it is known or not.
    #[test]
    fn a_row_whose_input_is_awaited_differs_in_its_token_only() {
        let spec = SamplingSpec {
            temperature: 0.5,
            min_tokens: 3,
            stop_token_ids: Box::new([7]),
            ..SamplingSpec::default()
        };
        let plan = |generated: &[u32], awaited: usize| {
            let mut builder = PlanBuilder::new(Epoch(1));
            builder.push_decode(RowInput {
                request: RequestId(1),
                slot: SlotId::new(0).unwrap(),
                start: 4,
                tokens: if awaited > 0 { &[0] } else { &[9] },
                source: (awaited > 0).then_some(2),
                table: &[0],
                table_tokens: 100,
                sample: Some(SampleInput {
                    spec: &spec,
                    prompt: &[1, 2],
                    generated,
                    awaited,
                }),
            });
            builder.finish()
        };
        for count in 1..5 {
            let known = vec![9; count];
            let (full, ahead) = (plan(&known, 0), plan(&known[1..], 1));
            assert_eq!(ahead.sampling, full.sampling);
            assert_eq!(
                (ahead.token_ids, ahead.token_sources),
                (vec![0], vec![2]),
                "{count} tokens"
            );
        }
    }
}
