//! Invariants of the generator: identical bytes on every machine, and an up-to-date `world.json`.

use std::path::Path;

use story_generator::{Corpus, Lesson, Split, Stories, lexicon};

/// Stories whose names and colors are replaced.
fn stories() -> Stories {
    let story = |number: usize| format!("Tim had a red ball. He saw Lily, and she had {number} balls.");
    Stories::new(1, [(0..50).map(story).collect(), Vec::new(), Vec::new()])
}

/// Checks the checksum of the corpus generated from a seed.
///
/// A new value means a new corpus and a new model.
#[test]
fn first_megabyte_of_a_seed_is_stable() {
    let mut stories = stories();
    let mut corpus = Corpus::new(1, Lesson::RowsAndStories, Split::Training, 4096, &mut stories);
    let mut bytes = String::new();
    while bytes.len() < 1 << 20 {
        bytes += &serde_json::to_string(&corpus.next_line()).unwrap();
        bytes.push('\n');
    }
    let mut checksum = flate2::Crc::new();
    checksum.update(&bytes.as_bytes()[..1 << 20]);
    assert_eq!(
        checksum.sum(),
        4_080_002_989,
        "the rules or words were changed: write the new value here, and train again"
    );
}

#[test]
fn world_json_matches_the_lexicon() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../world.json");
    let written: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(written, lexicon().world(), "`story-generator world > models/stories/world.json` writes it");
    for kind in ["objects", "places", "animals"] {
        let nouns = written[kind].as_array().unwrap();
        assert!(
            nouns.len() >= 25
                && nouns.iter().all(|noun| !noun.as_str().unwrap().starts_with(['a', 'e', 'i', 'o', 'u']))
        );
    }
}
