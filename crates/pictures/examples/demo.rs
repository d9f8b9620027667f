//! demo
#[path = "../tests/suite/samples.rs"]
mod samples;
use gpt2_pictures::*;
fn main() {
    let d = "/tmp/pic";
    std::fs::create_dir_all(d).unwrap();
    let tok = samples::sentence();
    let mut gaps = samples::attention(2, 3, samples::sentence());
    let n = tok.len() * tok.len();
    gaps.values[n..2 * n].fill(None);
    let list: Vec<(&str, Report)> = vec![
        ("attention", samples::attention(12, 12, tok.clone())),
        ("gaps", gaps),
        ("onehead", samples::attention(1, 1, tok.clone())),
        ("attention64", samples::attention(12, 12, samples::many(64))),
        ("attention300", samples::attention(4, 12, samples::many(300))),
        ("lens", samples::lens(13, tok.clone())),
        ("hostile", samples::attention(2, 2, samples::hostile())),
        ("lenshostile", samples::lens(4, samples::hostile())),
        ("ablate", samples::layers_by_heads(12, 12)),
        ("saliency", samples::bars(Axis::tokens("token", &tok), tok.clone())),
        ("layers", samples::bars(Axis::numbers("layer", 0..13), tok.clone())),
        ("long", samples::bars(Axis::numbers("layer", 0..200), tok.clone())),
        ("three", samples::three_axes()),
    ];
    for (name, report) in list {
        std::fs::write(format!("{d}/{name}.html"), page(&report)).unwrap();
        for (suffix, w) in [("1", Width::OneColumn), ("2", Width::TwoColumns)] {
            match svg(&report, w) {
                Ok(s) => std::fs::write(format!("{d}/{name}{suffix}.svg"), s).unwrap(),
                Err(e) => println!("{name}: {e}"),
            }
        }
        std::fs::write(format!("{d}/{name}.txt"), table(&report)).unwrap();
    }
}
