//! What benches are called with.

use std::error::Error;

use candle_gpt2_arithmetic::{limits, set_thread_count};

/// Sets what `--threads N` and `--instructions SET` say; the other arguments are names of what is to be measured, all if there
/// is none.
pub(crate) fn names() -> Result<Vec<String>, Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut names = Vec::new();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--threads" => {
                set_thread_count(arguments.next().unwrap_or_default().parse()?);
            }
            "--instructions" => {
                let name = arguments.next().unwrap_or_default();
                if !limits::choose_instruction_set(&name) {
                    return Err(format!("{name}: not a set of this processor").into());
                }
            }
            // `cargo bench` gives `--bench`.
            name if name.starts_with('-') => {}
            name => names.push(name.to_owned()),
        }
    }
    Ok(names)
}
