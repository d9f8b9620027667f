//! Items that the protocols build with the built-in model's tokenizer, and their metrics.

mod damaged;
mod lambada;
mod metrics;
mod names;
mod questions;
mod windows;

use std::path::Path;

use candle_gpt2_engine::{DeviceChoice, ModelOptions, Opened, Silent, Vocabulary};
use candle_gpt2_evaluation::{Choice, Data, EvaluationError, Item, Prepared, Setting, Work, named};
use candle_gpt2_generation::Sequence;
use candle_gpt2_testing::CheckpointFolder;

/// Context of the built-in model.
const N_POSITIONS: usize = 512;

struct Model(Opened);

impl Model {
    /// Opens the built-in model without its weights.
    fn built_in() -> Self {
        let options = ModelOptions { device: DeviceChoice::Cpu, ..ModelOptions::default() };
        Self(options.open(&Silent).unwrap())
    }

    /// Opens a model with a context of 48 tokens, without its weights.
    fn tiny() -> Self {
        let folder = CheckpointFolder::tiny();
        let options = ModelOptions { model: folder.path().to_owned(), ..ModelOptions::default() };
        Self(options.open(&Silent).unwrap())
    }

    fn vocabulary(&self) -> &Vocabulary {
        self.0.vocabulary()
    }

    fn ids(&self, text: &str) -> Vec<u32> {
        self.vocabulary().encode(text).unwrap()
    }

    fn text(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| self.vocabulary().token_bytes(*id)).collect();
        String::from_utf8(bytes).unwrap()
    }

    fn try_prepare(
        &self,
        protocol: &str,
        limit: Option<usize>,
        data: &Data,
    ) -> Result<Prepared, EvaluationError> {
        let (protocol, number) = named(protocol).unwrap();
        let number = number.or(protocol.parameter.and_then(|parameter| parameter.default));
        let setting =
            Setting { parameter: number.unwrap_or(0), limit, ..Setting::new(self.vocabulary(), &Silent) };
        (protocol.prepare)(data, &setting)
    }

    /// Prepares the whole file with a protocol.
    fn prepare(&self, protocol: &str, name: &str, text: &str) -> Prepared {
        let prepared = self.try_prepare(protocol, None, &data(name, text)).unwrap();
        assert_eq!(prepared.damaged, None);
        prepared
    }

    /// Prepares one line of JSON, which yields a single item.
    fn item(&self, protocol: &str, line: &str) -> Item {
        let mut prepared = self.prepare(protocol, "items.jsonl", line);
        assert_eq!((prepared.items.len(), prepared.truncated_count), (1, 0));
        prepared.items.remove(0)
    }

    /// Text before each choice's first scored token, and the text from that token onward.
    fn pieces(&self, item: &Item) -> Vec<(String, String)> {
        let piece = |choice: &Choice| {
            let Sequence { ids, first } = only_sequence(choice);
            (self.text(&ids[..*first]), self.text(&ids[*first..]))
        };
        choices(item).iter().map(piece).collect()
    }
}

fn data(name: &str, text: &str) -> Data {
    Data::from_bytes(Path::new(name), text.as_bytes().to_vec()).unwrap()
}

fn choices(item: &Item) -> &[Choice] {
    match &item.work {
        Work::Score { choices, .. } => choices,
        Work::Write { .. } => panic!("item {} is written", item.index),
    }
}

fn gold(item: &Item) -> Option<usize> {
    match &item.work {
        Work::Score { gold, .. } => *gold,
        Work::Write { .. } => panic!("item {} is written", item.index),
    }
}

fn only_sequence(choice: &Choice) -> &Sequence {
    let [sequence] = choice.sequences.as_slice() else { panic!("several sequences") };
    sequence
}

/// Converts pieces to owned strings.
fn owned(pieces: &[(&str, &str)]) -> Vec<(String, String)> {
    pieces.iter().map(|(before, behind)| ((*before).to_owned(), (*behind).to_owned())).collect()
}
