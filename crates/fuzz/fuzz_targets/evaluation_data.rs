//! Fuzzes `gpt2 eval` data files for every protocol, with the built-in model's tokenizer.
//!
//! The first byte selects the file format. Data must either be rejected or yield items that fit the model.
#![no_main]

use std::sync::LazyLock;

use candle_gpt2_engine::{ModelOptions, Opened, Silent};
use candle_gpt2_evaluation::{Data, Prepared, Setting, Work, protocols};

static OPENED: LazyLock<Opened> =
    LazyLock::new(|| ModelOptions::default().open(&Silent).expect("the model inside the program"));

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((kind, bytes)) = bytes.split_first() else { return };
    let name = ["data.jsonl", "data.csv", "data.txt"][usize::from(kind % 3)];
    let path = candle_gpt2_fuzz::file(name, bytes);
    let Ok(data) = Data::read(&path) else { return };
    let setting = Setting {
        vocabulary: OPENED.vocabulary(),
        parameter: 100,
        context: None,
        limit: Some(20),
        shots: None,
        reporter: &Silent,
    };
    for protocol in protocols() {
        if let Ok(prepared) = (protocol.prepare)(&data, &setting) {
            check(&prepared, OPENED.config().n_positions);
        }
    }
});

/// Checks that all prepared items fit the model.
fn check(prepared: &Prepared, n_positions: usize) {
    assert!(prepared.items.len() <= 20);
    for (index, item) in prepared.items.iter().enumerate() {
        assert_eq!(item.index, index);
        match &item.work {
            Work::Score { choices, gold } => {
                assert!(!choices.is_empty() && gold.is_none_or(|gold| gold < choices.len()));
                for sequence in choices.iter().flat_map(|choice| &choice.sequences) {
                    assert!(sequence.ids.len() <= n_positions + 1);
                    assert!((1..sequence.ids.len()).contains(&sequence.first));
                }
            }
            Work::Write { prompt, tokens, .. } => {
                assert!(!prompt.is_empty() && prompt.len() + tokens <= n_positions);
            }
        }
    }
}
