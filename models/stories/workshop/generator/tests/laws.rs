//! Laws of the whole generator: the same bytes on every machine, and `world.json` is the lexicon's.

use std::path::Path;

use story_generator::{Corpus, Lesson, Split, Stories, lexicon};

/// Stories of the test: their names and colors are replaced.
fn stories() -> Stories {
    let story = |number: usize| format!("Tim had a red ball. He saw Lily, and she had {number} balls.");
    Stories::new(1, [(0..50).map(story).collect(), Vec::new(), Vec::new()])
}

/// Checksum of the bytes of a seed: another value is another corpus, and another model.
#[test]
fn the_first_megabyte_of_a_seed_stays() {
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
        448_963_783,
        "the rules or words were changed: write the new value here, and train again"
    );
}

#[test]
fn the_world_of_outsiders_is_the_lexicons() {
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
