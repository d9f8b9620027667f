//! `gpt2 verify`: is the checkpoint sound?

use std::process::ExitCode;

use anyhow::Result;
use gpt2_weights::{Checkpoint, WeightsError};
use serde_json::json;

use crate::arguments::VerifyArguments;
use crate::{EXIT_FAILURE, is_closed_pipe, output, progress};

pub(crate) fn run(arguments: &VerifyArguments) -> Result<ExitCode> {
    let (problems, is_opened) = match problems(arguments) {
        Ok(problems) => (problems, true),
        // A checkpoint that cannot even be opened has one problem.
        Err(error) if arguments.json => (vec![error.to_string()], false),
        Err(error) => return Err(error.into()),
    };
    let sound = is_opened && problems.is_empty();
    match report(arguments, sound, &problems) {
        // The verdict is the exit code, whether or not all of the list is read.
        Err(error) if !is_closed_pipe(&error) => return Err(error),
        _ => {}
    }
    Ok(if sound { ExitCode::SUCCESS } else { ExitCode::from(EXIT_FAILURE) })
}

fn report(arguments: &VerifyArguments, sound: bool, problems: &[String]) -> Result<()> {
    if arguments.json {
        return output::write_json(&json!({ "sound": sound, "problems": problems }));
    }
    for problem in problems {
        output::write_line(problem)?;
    }
    output::write_line(&match problems.len() {
        0 => "sound: every tensor is there, with its shape and finite values".to_owned(),
        1 => "not sound: 1 problem".to_owned(),
        several => format!("not sound: {several} problems"),
    })
}

fn problems(arguments: &VerifyArguments) -> Result<Vec<String>, WeightsError> {
    let checkpoint = Checkpoint::open(&arguments.model)?;
    let bar = progress::bytes("reading", checkpoint.parameter_bytes());
    let problems = checkpoint.verify(&|bytes| bar.inc(bytes))?;
    bar.finish_and_clear();
    Ok(problems.iter().map(ToString::to_string).collect())
}
