//! Command-line arguments for the benchmarks.

use std::error::Error;

use candle_gpt2_arithmetic::{limits, set_thread_count};

/// Applies `--threads N` and `--instructions SET` and returns the names of the benchmarks to run.
///
/// An empty list selects all benchmarks.
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
                    return Err(
                        format!("this processor does not support the instruction set `{name}`").into()
                    );
                }
            }
            // `cargo bench` passes `--bench`.
            name if name.starts_with('-') => {}
            name => names.push(name.to_owned()),
        }
    }
    Ok(names)
}
