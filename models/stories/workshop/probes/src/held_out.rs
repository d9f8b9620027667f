//! Held-out stories: bits per byte compared with a 5-gram model and gzip, and size relative to xz.

use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use candle_gpt2_compression::Compressor;
use candle_gpt2_engine::Silent;
use flate2::Compression;
use flate2::write::GzEncoder;

use crate::circuits::losses;
use crate::figures::Figure;
use crate::ngrams::KneserNey;
use crate::subject::Subject;

/// Number of bytes of prose to compress.
const COMPRESSED_BYTES: usize = 20_000;

pub(crate) fn run(subject: &Subject, held_out: &[String], trained: &[String]) -> Result<Vec<Figure>> {
    let documents =
        |texts: &[String]| texts.iter().map(|text| subject.prompt(text)).collect::<Result<Vec<_>>>();
    let counted = KneserNey::new(&documents(trained)?, subject.loaded.config().vocab_size)?;
    let of_counts: f64 = documents(held_out)?.iter().map(|ids| counted.nats(ids)).sum();
    let all = held_out.join("\n\n");
    let mut gzip = GzEncoder::new(Vec::new(), Compression::best());
    gzip.write_all(all.as_bytes())?;
    let gzip_bits = 8.0 * gzip.finish()?.len() as f64 / all.len() as f64;
    let end = all.floor_char_boundary(COMPRESSED_BYTES);
    let prose = &all.as_bytes()[..end];
    let mut compressed = Vec::new();
    Compressor::new(&subject.loaded, "model", None)?.compress(
        &mut &prose[..],
        None,
        &mut compressed,
        &Silent,
    )?;
    Ok(vec![
        Figure::new("held-out bits per byte", bits_per_byte(subject, held_out)?).at_most(1.05),
        Figure::new("bits per byte of a token 5-gram model", bits(of_counts, held_out)),
        Figure::new("bits per byte of gzip", gzip_bits),
        Figure::new("20 kB compressed, over xz -9e", compressed.len() as f64 / xz(prose)? as f64)
            .at_most(0.36),
    ])
}

/// Returns the bits per byte of texts, each evaluated on its own.
pub(crate) fn bits_per_byte(subject: &Subject, texts: &[String]) -> Result<f64> {
    let mut sum = 0.0;
    for text in texts {
        sum += nats(subject, &subject.prompt(text)?)?;
    }
    Ok(bits(sum, texts))
}

fn bits(nats: f64, texts: &[String]) -> f64 {
    nats / std::f64::consts::LN_2 / texts.iter().map(String::len).sum::<usize>().max(1) as f64
}

/// Negative log-likelihood of a document, in nats.
///
/// A document that exceeds the context is split into windows that overlap by half the context.
fn nats(subject: &Subject, ids: &[u32]) -> Result<f64> {
    let context = subject.loaded.config().n_positions;
    let (mut sum, mut start, mut predicted) = (0.0, 0, 1);
    while predicted < ids.len() {
        let end = ids.len().min(start + context);
        let losses = losses(subject, &ids[start..end], &mut [])?;
        sum += losses[predicted - 1 - start..].iter().map(|loss| f64::from(*loss)).sum::<f64>();
        predicted = end;
        start = end.saturating_sub(context / 2);
    }
    Ok(sum)
}

/// Size of a text compressed by xz, in bytes.
fn xz(text: &[u8]) -> Result<usize> {
    let mut child = Command::new("xz")
        .args(["-9e", "-c"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run `xz`; install xz-utils")?;
    child.stdin.take().context("cannot open the standard input of `xz`")?.write_all(text)?;
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "`xz -9e` failed: {}", output.status);
    Ok(output.stdout.len())
}
