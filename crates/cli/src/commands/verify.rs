//! `gpt2 verify`: is the checkpoint sound?

use std::process::ExitCode;

use anyhow::Result;
use gpt2_weights::{Checkpoint, WeightsError};
use serde_json::json;

use crate::arguments::VerifyArguments;
use crate::{EXIT_FAILURE, output, progress};

pub(crate) fn run(arguments: &VerifyArguments) -> Result<ExitCode> {
    let problems = problems(arguments);
    let sound = matches!(&problems, Ok(problems) if problems.is_empty());
    if arguments.json {
        // A checkpoint that cannot even be opened has one problem.
        let problems = problems.unwrap_or_else(|error| vec![error.to_string()]);
        output::write_json(&json!({ "sound": sound, "problems": problems }))?;
    } else {
        let problems = problems?;
        for problem in &problems {
            output::write_line(problem)?;
        }
        let verdict = match problems.len() {
            0 => "sound: every tensor is there, with its shape and finite values".to_owned(),
            1 => "not sound: 1 problem".to_owned(),
            several => format!("not sound: {several} problems"),
        };
        output::write_line(&verdict)?;
    }
    Ok(if sound {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(EXIT_FAILURE)
    })
}

fn problems(arguments: &VerifyArguments) -> Result<Vec<String>, WeightsError> {
    let checkpoint = Checkpoint::open(&arguments.model)?;
    let bar = progress::bytes("reading", checkpoint.parameter_bytes());
    let problems = checkpoint.verify(&|bytes| bar.inc(bytes))?;
    bar.finish_and_clear();
    Ok(problems.iter().map(ToString::to_string).collect())
}
