//! What the book's chapter on the architecture says of the crates: which needs which, and what none of them does.
//!
//! The drawing `docs/src/pictures/crates.svg` is made from their manifests. Where each crate stands is chosen by hand here; the arrows
//! are the manifests'. An arrow that follows from others is left out. The test fails when the file is another one than the manifests
//! give; `WRITE_PICTURES=1 cargo test -p candle-gpt2-book --test suite` writes it anew.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Each crate: its name, column and row of the middle of its box, and what it is.
const PLACES: [(&str, f64, f64, &str); 23] = [
    ("cli", 1.0, 0.0, "the program"),
    ("python", 2.0, 0.0, "the package"),
    ("browser", 4.4, 1.0, "the page's engine"),
    ("server", 3.4, 1.0, "connections"),
    ("api", 3.2, 2.0, "requests, answers"),
    ("evaluation", 0.0, 3.0, "benchmarks"),
    ("jobs", 1.0, 3.0, "files to folders"),
    ("grammar", 2.3, 3.0, "what may follow"),
    ("compression", 3.2, 3.0, "bytes and back"),
    ("look", 4.2, 3.0, "looks as reports"),
    ("training", 0.0, 4.0, "steps, adapters"),
    ("engine", 1.1, 4.0, "name to model"),
    ("pictures", 2.7, 4.0, "pages, drawings"),
    ("confined", 3.7, 4.0, "limits, templates"),
    ("stories", 0.0, 5.0, "the built-in model"),
    ("generation", 1.1, 5.0, "tokens to tokens"),
    ("weights", 2.2, 5.0, "files to model"),
    ("interpret", 4.4, 5.0, "looking inside"),
    ("web", 3.4, 5.0, "the page, parts"),
    ("gpt2", 2.2, 6.0, "the model"),
    ("attention", 2.2, 7.0, "attention layers"),
    ("kernels", 2.2, 8.0, "layers on tensors"),
    ("arithmetic", 2.2, 9.0, "loops on slices"),
];
/// Crates that only tests use.
const OF_TESTS: [&str; 2] = ["testing", "book"];

/// Pixels from one column or row to the next, and the size of a box.
const COLUMN: f64 = 158.0;
const ROW: f64 = 78.0;
const BOX: (f64, f64) = (136.0, 44.0);
const MARGIN: f64 = 16.0;

/// A crate and those that it needs, by the names of their folders.
type Needs = BTreeMap<String, BTreeSet<String>>;

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The workspace's crates that each manifest lists under `[dependencies]`.
fn needs() -> Needs {
    let folder_of = |package: &str| match package.strip_prefix("candle-gpt2") {
        Some("") => Some("gpt2".to_owned()),
        Some(rest) => rest.strip_prefix('-').map(str::to_owned),
        None => None,
    };
    let crates = std::fs::read_dir(root().join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let mut needs = Needs::new();
    for folder in crates.chain(["models/stories", "web"].map(|folder| root().join(folder))) {
        let Ok(manifest) = std::fs::read_to_string(folder.join("Cargo.toml")) else { continue };
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        // The fuzz targets are a workspace of their own.
        if manifest.contains("[workspace]") || OF_TESTS.contains(&&*name) {
            continue;
        }
        let mut is_wanted = false;
        let own = needs.entry(name).or_default();
        for line in manifest.lines() {
            if let Some(section) = line.strip_prefix('[') {
                is_wanted = section.ends_with("dependencies]") && !section.contains("dev-");
            } else if is_wanted {
                own.extend(folder_of(line.split(['.', ' ', '=']).next().unwrap_or_default()));
            }
        }
    }
    needs
}

/// Everything that a crate needs, directly or through others.
fn reached(needs: &Needs, name: &str) -> BTreeSet<String> {
    let direct = &needs[name];
    direct.iter().flat_map(|other| reached(needs, other).into_iter().chain([other.clone()])).collect()
}

/// The arrows that follow from no others.
fn arrows(needs: &Needs) -> Vec<(String, String)> {
    let mut arrows = Vec::new();
    for (name, direct) in needs {
        for other in direct {
            let follows = direct.iter().any(|between| reached(needs, between).contains(other));
            arrows.extend((!follows).then(|| (name.clone(), other.clone())));
        }
    }
    arrows
}

fn drawing(needs: &Needs) -> String {
    let middle =
        |column: f64, row: f64| (MARGIN + BOX.0 / 2.0 + column * COLUMN, MARGIN + BOX.1 / 2.0 + row * ROW);
    let place = |name: &str| {
        let found = PLACES.iter().find(|(known, ..)| *known == name);
        found.map(|(_, column, row, _)| middle(*column, *row)).unwrap()
    };
    let (width, height) = (2.0 * MARGIN + BOX.0 + 4.4 * COLUMN, 2.0 * MARGIN + BOX.1 + 9.0 * ROW);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"sans-serif\" \
         text-anchor=\"middle\">\n<title>The crates; an arrow points to what a crate needs</title>\n\
         <defs><marker id=\"tip\" viewBox=\"0 0 8 8\" refX=\"8\" refY=\"4\" markerWidth=\"7\" markerHeight=\"7\" orient=\"auto\">\
         <path d=\"M0 0L8 4L0 8z\" fill=\"#667\"/></marker></defs>\n\
         <rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#fff\"/>\n"
    );
    for (from, to) in arrows(needs) {
        let ((x, y), (to_x, to_y)) = (place(&from), place(&to));
        assert!(y < to_y, "{from} needs {to}, and stands below it: move one of them in PLACES");
        let (start, end) = (y + BOX.1 / 2.0, to_y - BOX.1 / 2.0);
        // Arrows from afar meet at the middle of a box's upper edge.
        writeln!(
            svg,
            "<path d=\"M{x:.0} {start:.0}L{to_x:.0} {end:.0}\" stroke=\"#667\" fill=\"none\" marker-end=\"url(#tip)\"><title>{from} \
             needs {to}</title></path>"
        )
        .unwrap();
    }
    for (name, column, row, what) in PLACES {
        let (x, y) = middle(column, row);
        let (left, top) = (x - BOX.0 / 2.0, y - BOX.1 / 2.0);
        writeln!(
            svg,
            "<rect x=\"{left:.0}\" y=\"{top:.0}\" width=\"{:.0}\" height=\"{:.0}\" rx=\"6\" fill=\"#eef2fb\" stroke=\"#446\"/>\
             <text x=\"{x:.0}\" y=\"{:.0}\" font-size=\"15\" font-weight=\"bold\" fill=\"#223\">{name}</text>\
             <text x=\"{x:.0}\" y=\"{:.0}\" font-size=\"12\" fill=\"#446\">{what}</text>",
            BOX.0,
            BOX.1,
            y - 3.0,
            y + 14.0,
        )
        .unwrap();
    }
    svg + "</svg>\n"
}

#[test]
fn the_drawing_of_the_crates_is_that_of_their_manifests() {
    let needs = needs();
    let placed: BTreeSet<&str> = PLACES.iter().map(|(name, ..)| *name).collect();
    let there: BTreeSet<&str> = needs.keys().map(String::as_str).collect();
    assert_eq!(placed, there, "PLACES has each crate once");

    let path = root().join("docs/src/pictures/crates.svg");
    let drawing = drawing(&needs);
    if std::env::var_os("WRITE_PICTURES").is_some() {
        std::fs::write(&path, &drawing).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    let how = "WRITE_PICTURES=1 cargo test -p candle-gpt2-book --test suite";
    assert!(
        found == drawing,
        "docs/src/pictures/crates.svg is not what the manifests say; write it anew: {how}"
    );
}

/// What a crate's code does not name, and why.
const NEVER: [(&[&str], &[&str], &str); 5] = [
    (
        &["training"],
        &["candle_gpt2_engine", "candle_gpt2_generation", "candle_gpt2_pictures", "plotters"],
        "it knows no names of models, no texts and no pictures",
    ),
    (&["arithmetic", "pictures"], &["candle_core", "candle_nn"], "it knows no tensor"),
    (
        &["attention", "gpt2", "generation", "interpret", "pictures", "grammar", "api", "compression"],
        &["std::fs", "File::open"],
        "it opens no file",
    ),
    (
        &[
            "kernels",
            "attention",
            "gpt2",
            "weights",
            "generation",
            "interpret",
            "engine",
            "look",
            "grammar",
            "compression",
        ],
        &["Instant::now", "SystemTime::now"],
        "it reads no clock",
    ),
    (
        &["grammar", "api", "compression", "engine", "look"],
        &["std::net", "tokio", "hyper"],
        "it has no connections",
    ),
];

#[test]
fn each_crate_keeps_to_its_part() {
    for (crates, words, why) in NEVER {
        for name in crates {
            let mut folders = vec![root().join("crates").join(name).join("src")];
            while let Some(folder) = folders.pop() {
                for entry in std::fs::read_dir(&folder).unwrap() {
                    let path = entry.unwrap().path();
                    if path.is_dir() {
                        folders.push(path);
                        continue;
                    }
                    // It counts the `max_time` of a checkpoint's files where a caller gives no clock.
                    if path.ends_with("engine/src/clock.rs") {
                        continue;
                    }
                    // They give up on a Hub that is silent.
                    if path.ends_with("engine/src/hub/client.rs") || path.ends_with("engine/src/hub/http.rs")
                    {
                        continue;
                    }
                    // It bounds the fraction of the time that slow grammars take.
                    if path.ends_with("grammar/src/process.rs") {
                        continue;
                    }
                    // A module of tests alone, which writes the description when asked to.
                    if path.ends_with("api/src/description.rs") {
                        continue;
                    }
                    // Pictures and pages stand beside the code.
                    if path.extension().is_none_or(|ending| ending != "rs") {
                        continue;
                    }
                    let code = std::fs::read_to_string(&path).unwrap();
                    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
                    let named =
                        lines.flat_map(|line| words.iter().filter(move |word| line.contains(**word))).next();
                    assert_eq!(named, None, "{}: {why}", path.display());
                }
            }
        }
    }
}
