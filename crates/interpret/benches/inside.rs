//! Benchmarks for GPT-2 124M with synthetic f32 weights: grids, record memory, circuits and graphs.
//!
//! The speed does not depend on the values of the weights. Run
//! `cargo bench -p candle-gpt2-interpret --bench inside -- CASE [--threads N] [--instructions SET]`. It
//! prints one JSON line. `python -m bench inside` compares it with TransformerLens, and
//! `python -m bench circuits` runs the last two cases. Cases:
//!
//! - `ablation`: each of the 144 heads in turn set to TransformerLens' zero at every position of a 15-token
//!   prompt
//! - `patching`: activation patching of the residual stream at each block and position of a 15-token
//!   prompt, 180 cells
//! - `memory`: a record of all residual streams and patterns of 512 tokens: its size and the peak memory of
//!   the process (Linux)
//! - `eap`: edge attribution patching, the scores of all 32,491 edges on 100 pairs of 16-token prompts
//! - `graph`: the attribution graph of 15 tokens with incoming edges for 5,000 neurons as features

#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark prints, and stops at an error")]

use std::time::Instant;

use candle_core::Tensor;
use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel, Site, SiteKind};
use candle_gpt2_arithmetic::{NumberType, limits, set_thread_count};
use candle_gpt2_interpret::{
    Ablation, AttributionGraph, CircuitMetric, CircuitTask, EdgeMethod, GraphOptions, GridAxis, Metric,
    Patching, PromptPair, Record, ReplacementModel, Run, Transcoders, ablation_grid,
};
use candle_gpt2_testing::MadeUpWeights;
use serde_json::{Value, json};

/// Minimum number of runs and minimum total seconds for a measurement, which reports the median.
const SHORTEST: (usize, f64) = (3, 2.0);
const GRID_TOKENS: usize = 15;
const RECORDED_TOKENS: usize = 512;
const PAIRS: usize = 100;
const PAIR_TOKENS: usize = 16;
/// Number of active neurons per layer and token; up to `FEATURES` of them get incoming edges.
const NEURONS: usize = 32;
const FEATURES: usize = 5_000;
const CASES: [&str; 5] = ["ablation", "patching", "memory", "eap", "graph"];

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let value = |name: &str| {
        let place = arguments.iter().position(|argument| argument == name)?;
        arguments.get(place + 1)
    };
    if let Some(threads) = value("--threads") {
        set_thread_count(threads.parse().unwrap());
    }
    if let Some(name) = value("--instructions") {
        let sets = limits::instruction_sets();
        assert!(limits::choose_instruction_set(name), "{name}: this processor has {}", sets.join(", "));
    }
    let case = arguments.get(1).map(String::as_str).filter(|case| CASES.contains(case));
    let Some(case) = case else {
        // Measures nothing without a case name, because `cargo bench` on the whole workspace passes none.
        println!("name a case: {}", CASES.join(", "));
        return;
    };
    let config = Gpt2Config::preset("gpt2").expect("a published model");
    let model = Gpt2LMHeadModel::load(&config, MadeUpWeights::new(NumberType::F32)).unwrap();
    let found = match case {
        "ablation" => ablation(&model),
        "patching" => patching(&model),
        "eap" => eap(&model),
        "graph" => graph(&model),
        _ => memory(&model),
    };
    println!("{found}");
}

fn ablation(model: &Gpt2LMHeadModel) -> Value {
    let ids = prompt(GRID_TOKENS);
    measure("ablation", || {
        let run = Run::new(model, &ids).unwrap();
        ablation_grid(&run, &metric(), &Ablation::TransformerLensZero, &|| ()).unwrap().values
    })
}

/// Measures activation patching, including the unpatched runs of both prompts.
fn patching(model: &Gpt2LMHeadModel) -> Value {
    let clean = prompt(GRID_TOKENS);
    let mut corrupted = clean.clone();
    corrupted[4] += 1;
    measure("patching", || {
        let [clean, corrupted] = [&clean, &corrupted].map(|ids| Run::new(model, ids).unwrap());
        let patching = Patching::new(clean, corrupted, metric()).unwrap();
        patching.grid(SiteKind::ResidPre, GridAxis::Position, &|| ()).unwrap().values
    })
}

fn measure(case: &str, grid: impl Fn() -> Vec<Vec<f32>>) -> Value {
    let cells: usize = grid().iter().map(Vec::len).sum();
    let mut seconds = Vec::new();
    while seconds.len() < SHORTEST.0 || seconds.iter().sum::<f64>() < SHORTEST.1 {
        let start = Instant::now();
        let values = grid();
        seconds.push(start.elapsed().as_secs_f64());
        drop(values);
    }
    seconds.sort_by(f64::total_cmp);
    json!({ "case": case, "cells": cells, "tokens": GRID_TOKENS, "seconds": seconds[seconds.len() / 2] })
}

fn eap(model: &Gpt2LMHeadModel) -> Value {
    let pair = |place: usize| {
        let token = |index: usize| u32::try_from((place * PAIR_TOKENS + index) * 37 % 50_000).unwrap();
        let clean: Vec<u32> = (0..PAIR_TOKENS).map(token).collect();
        let mut corrupted = clean.clone();
        corrupted[10] += 1;
        PromptPair { clean, corrupted, correct: vec![5335], incorrect: vec![1757], ..PromptPair::default() }
    };
    let pairs: Vec<PromptPair> = (0..PAIRS).map(pair).collect();
    let task = CircuitTask::new(model, &pairs, CircuitMetric::LogitDifference).unwrap();
    let start = Instant::now();
    let scores = task.scores(EdgeMethod::Eap, &|_| ()).unwrap();
    let seconds = start.elapsed().as_secs_f64();
    json!({
        "case": "eap", "edges": scores.len(), "pairs": PAIRS, "tokens": PAIR_TOKENS, "seconds": seconds,
        "peak_MB": status("VmHWM:") as f64 / 1e6,
    })
}

fn graph(model: &Gpt2LMHeadModel) -> Value {
    let ids = prompt(GRID_TOKENS);
    let start = Instant::now();
    let run = Run::new(model, &ids).unwrap();
    let transcoders = Transcoders::of_neurons(model, NEURONS).unwrap();
    let options = GraphOptions { max_feature_nodes: FEATURES, ..GraphOptions::default() };
    let replacement = ReplacementModel::new(&run, &transcoders, &options).unwrap();
    let graph = AttributionGraph::trace(&replacement, &|_, _| ()).unwrap();
    let traced = start.elapsed().as_secs_f64();
    let pruned = graph.pruned(0.8, 0.98);
    json!({
        "case": "graph", "tokens": GRID_TOKENS, "active": graph.active_features, "features": FEATURES,
        "edges": pruned.edges.len(), "trace_seconds": traced, "seconds": start.elapsed().as_secs_f64(),
        "peak_MB": status("VmHWM:") as f64 / 1e6,
    })
}

/// Measures the size of a record, and the peak memory beyond the record and the model.
fn memory(model: &Gpt2LMHeadModel) -> Value {
    let ids = prompt(RECORDED_TOKENS);
    let run = Run::new(model, &ids).unwrap();
    let layers = model.config().n_layer;
    // Only the last block's output is recorded: every other output is the next block's input.
    let last = Site::in_block(layers - 1, SiteKind::ResidPost);
    let kinds = [SiteKind::ResidPre, SiteKind::ResidMid, SiteKind::Pattern];
    let inside = (0..layers).flat_map(|layer| kinds.map(|kind| Site::in_block(layer, kind)));
    let sites: Vec<Site> = inside.chain([last]).collect();
    let loaded = status("VmRSS:");
    // Resets the peak to the current resident size.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let at_start = status("VmHWM:");
    let record: Record = run.record(sites).unwrap();
    let peak = status("VmHWM:");
    let of = |tensor: &Tensor| tensor.elem_count() * tensor.dtype().size_in_bytes();
    let kept: usize = record.values.values().map(of).sum();
    let megabytes = |bytes: usize| bytes as f64 / 1e6;
    json!({
        "case": "memory",
        "tokens": RECORDED_TOKENS,
        "loaded_MB": megabytes(loaded),
        "at_start_MB": megabytes(at_start),
        "peak_MB": megabytes(peak),
        "kept_MB": megabytes(kept),
        "more_MB": megabytes(peak) - megabytes(loaded) - megabytes(kept),
    })
}

/// Reads a memory counter of this process from `/proc/self/status`, in bytes.
fn status(name: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<usize>().unwrap() * 1024
}

fn prompt(tokens: usize) -> Vec<u32> {
    (0..50_000).step_by(37).take(tokens).collect()
}

fn metric() -> Metric {
    Metric::logit_difference(5335, 1757, GRID_TOKENS - 1)
}
