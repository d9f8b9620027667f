//! Laws of the whole generator: the same bytes on every machine, no faults, varied enough; and `world.json` is its lexicon's.

use std::path::Path;

use story_generator::{Corpus, Lesson, Split, diversity, faults, lexicon, story};

/// The bytes of a seed, written down as their CRC-32: another value is another corpus, and another model.
#[test]
fn the_first_megabyte_of_a_seed_stays() {
    let mut corpus = Corpus::new(1, Lesson::Mixture, Split::Training, 2048);
    let mut bytes = String::new();
    while bytes.len() < 1 << 20 {
        bytes += &serde_json::to_string(&corpus.next_line().unwrap()).unwrap();
        bytes.push('\n');
    }
    let mut checksum = flate2::Crc::new();
    checksum.update(&bytes.as_bytes()[..1 << 20]);
    assert_eq!(
        checksum.sum(),
        1_548_275_368,
        "the rules or words were changed: write the new value here, and train again"
    );
}

#[test]
fn no_story_has_a_fault() {
    for seed in 0..3000 {
        let text = story(seed).unwrap().text;
        assert_eq!(faults(&text), [], "story {seed}: {text}");
    }
}

#[test]
fn stories_differ() {
    let stories: Vec<String> = (0..3000).map(|seed| story(seed).unwrap().text).collect();
    for figure in diversity(&stories).unwrap() {
        assert!(figure.is_met(), "{figure:?}");
    }
    let lengths: Vec<usize> = stories.iter().map(|story| story.split_whitespace().count()).collect();
    assert!(lengths.iter().all(|words| (10..400).contains(words)), "{:?}", lengths.iter().max());
}

#[test]
fn the_world_of_outsiders_is_the_lexicons() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../world.json");
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
