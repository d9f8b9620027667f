//! Packed rows of different lengths: values and gradients must equal those of each row alone.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_gpt2::{
    ByOutput, Gpt2Cache, Gpt2Config, Gpt2LMHeadModel, Gpt2Model, KvPool, LogitsFor, Observer, Pass, Site,
    SiteKind, expected_parameters, gradients,
};
use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_kernels::composed;
use candle_gpt2_testing::{assert_parity, device, dtype, pattern, values, worst};
use candle_nn::VarBuilder;

/// Tolerance for f32 arithmetic in a different summation order, on hidden states of magnitude 3.
const SAME: f64 = 1e-5;

const ROWS: [&[u32]; 4] = [&[5, 9, 1, 3, 11, 12, 0], &[2], &[7, 7, 4], &[12, 0, 3, 8, 8]];

fn config() -> Gpt2Config {
    let sizes = Gpt2Config {
        vocab_size: 13,
        n_positions: 7,
        n_embd: 10,
        n_layer: 3,
        n_head: 2,
        ..Gpt2Config::gpt2()
    };
    Gpt2Config { embd_pdrop: 0.0, attn_pdrop: 0.0, resid_pdrop: 0.0, ..sizes }
}

fn variables(config: &Gpt2Config, dtype: DType, device: &Device) -> HashMap<String, Var> {
    let variable = |(index, parameter): (usize, candle_gpt2::Parameter)| {
        let values = pattern(&parameter.shape, 0.5, 100 * index as u64).to_dtype(dtype).unwrap();
        (parameter.name, Var::from_tensor(&values.to_device(device).unwrap()).unwrap())
    };
    expected_parameters(config).into_iter().enumerate().map(variable).collect()
}

fn model(config: &Gpt2Config, variables: &HashMap<String, Var>) -> Result<Gpt2Model> {
    let tensors = variables.iter().map(|(name, variable)| (name.clone(), variable.as_tensor().clone()));
    let first = variables["wte.weight"].as_tensor();
    Gpt2Model::load(
        config,
        ByOutput(VarBuilder::from_tensors(tensors.collect(), first.dtype(), first.device())),
    )
}

/// Runs each row separately and concatenates the results.
fn one_by_one(model: &Gpt2Model, pass: &mut Pass) -> Result<Tensor> {
    let device = model.device();
    let states = ROWS.map(|row| model.forward_with(&Tensor::new(row, device)?.unsqueeze(0)?, None, pass));
    Tensor::cat(&states.into_iter().collect::<Result<Vec<_>>>()?, 1)
}

#[test]
fn last_token_logits_cover_every_packed_row() -> Result<()> {
    let variables = variables(&config(), dtype(), &device());
    let tensors = variables.iter().map(|(name, variable)| (name.clone(), variable.as_detached_tensor()));
    let vb = VarBuilder::from_tensors(tensors.collect(), dtype(), &device());
    let model = Gpt2LMHeadModel::load(&config(), ByOutput(vb))?;
    let ids = Tensor::new(ROWS.concat(), &device())?.unsqueeze(0)?;
    let lengths: Arc<[usize]> = ROWS.map(<[u32]>::len).into();
    let of_rows = |logits_for| {
        model.forward_with(&ids, logits_for, None, &mut Pass::inference().of_rows(Arc::clone(&lengths)))
    };
    let every = of_rows(LogitsFor::EveryToken)?;
    let last = of_rows(LogitsFor::LastToken)?;
    assert_eq!(last.dims(), [1, 4, 13]);
    for (row, end) in [6, 7, 10, 15].into_iter().enumerate() {
        let expected = every.get(0)?.get(end)?.to_device(&Device::Cpu)?;
        assert_parity(&last.get(0)?.get(row)?, &expected, SAME, &format!("row {row}"));
    }
    Ok(())
}

#[test]
fn packed_rows_equal_the_rows_alone() -> Result<()> {
    let model = model(&config(), &variables(&config(), dtype(), &device()))?;
    let together = model.forward_rows(&ROWS, &mut Pass::inference())?;
    assert_eq!(together.dims(), [1, 16, 10]);
    let alone = one_by_one(&model, &mut Pass::inference())?;
    assert_parity(&together, &alone.to_device(&Device::Cpu)?, SAME, "with kernels");
    let observed = {
        // An observer receives the attention weights of all token pairs, even across rows.
        let mut weights = Weights(Vec::new());
        let together = model.forward_rows(&ROWS, &mut Pass::inference().observed_by(&mut weights))?;
        assert_eq!(weights.0.len(), 3);
        assert_eq!(weights.0[0].dims(), [1, 2, 16, 16]);
        let of_third_row = weights.0[2].get(0)?.get(1)?.get(9)?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        let seen: Vec<usize> = (0..16).filter(|key| of_third_row[*key] > 0.0).collect();
        assert_eq!(seen, [8, 9], "the second token of the third row");
        together
    };
    assert_parity(&observed, &alone.to_device(&Device::Cpu)?, SAME, "dense");
    let composed = composed(|| model.forward_rows(&ROWS, &mut Pass::inference()))?;
    assert_parity(&composed, &alone.to_device(&Device::Cpu)?, SAME, "composed");
    Ok(())
}

struct Weights(Vec<Tensor>);

impl Observer for Weights {
    fn wants(&self, site: Site) -> bool {
        site.kind == SiteKind::Pattern
    }

    fn observe(&mut self, _: Site, value: Tensor) -> Result<Tensor> {
        self.0.push(value.clone());
        Ok(value)
    }
}

/// In f64, summation orders differ only by rounding, so interference between rows would be visible.
#[test]
fn packed_gradients_equal_the_gradients_of_rows_alone() -> Result<()> {
    let config = config();
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F64, 1e-12)] {
        let variables = variables(&config, dtype, &Device::Cpu);
        let model = model(&config, &variables)?;
        let named: Vec<_> = variables.iter().filter(|(name, _)| *name != "lm_head.weight").collect();
        let tensors: Vec<&Tensor> = named.iter().map(|(_, variable)| variable.as_tensor()).collect();
        let weights = pattern(&[1, 16, 10], 1.0, 7).to_dtype(dtype)?;
        let of = |states: &dyn Fn(&mut Pass) -> Result<Tensor>, recomputing: bool| {
            let mut generator = RandomStream::new(1);
            let mut pass = Pass::training(&mut generator).recomputing(recomputing);
            gradients(&tensors, candle_gpt2::InitialGradients::Nothing, 1.0, || {
                (states(&mut pass)? * &weights)?.sum_all()
            })
        };
        let (loss, alone) = of(&|pass| one_by_one(&model, pass), false)?;
        let together = |pass: &mut Pass| model.forward_rows(&ROWS, pass);
        let variants = [
            ("kernels", of(&together, false)?),
            ("recomputed", of(&together, true)?),
            ("composed", composed(|| of(&together, false))?),
        ];
        for (variant, (found_loss, found)) in variants {
            // candle's derivative of GELU is accurate to seven digits.
            let tolerance = if variant == "composed" { f64::max(tolerance, 1e-7) } else { tolerance };
            assert!(
                (found_loss - loss).abs() <= tolerance * loss.abs().max(1.0),
                "{variant}: {found_loss}, {loss}"
            );
            for (((name, _), expected), found) in named.iter().zip(&alone).zip(&found) {
                let (expected, found) = (values(expected.as_ref().unwrap()), values(found.as_ref().unwrap()));
                let largest = worst(expected.iter().map(|value| value.abs()));
                let off =
                    worst(expected.iter().zip(&found).map(|(expected, found)| (expected - found).abs()));
                assert!(largest > 1e-3, "{name} has no gradient");
                assert!(
                    off <= tolerance * largest,
                    "{variant}, {dtype:?}: {name} is off by {off} of {largest}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn invalid_rows_are_rejected() -> Result<()> {
    let model = model(&config(), &variables(&config(), dtype(), &device()))?;
    let none: [&[u32]; 0] = [];
    let error_message =
        |rows: &[&[u32]]| model.forward_rows(rows, &mut Pass::inference()).unwrap_err().to_string();
    assert!(error_message(&none).contains("at least one token"), "{}", error_message(&none));
    let empty = error_message(&[&[1, 2], &[], &[3]]);
    assert!(empty.contains("row 1 (counted from 0) has 0 tokens; expected 1 to 7"), "{empty}");
    let long = error_message(&[&[1, 2], &[1; 8]]);
    assert!(long.contains("row 1 (counted from 0) has 8 tokens; expected 1 to 7"), "{long}");
    let unknown = error_message(&[&[1, 13]]);
    assert!(unknown.contains("13"), "{unknown}");
    let other_text = model.forward_with(
        &Tensor::new(&[[1u32, 2, 3]], &device())?,
        None,
        &mut Pass::inference().of_rows(Arc::new([2, 2])),
    );
    let other_text = other_text.expect_err("another length").to_string();
    assert!(other_text.contains("expected token IDs of shape (1, 4), found shape (1, 3)"), "{other_text}");
    let mut cache = Gpt2Cache::new(&config(), 1, 7, dtype(), &device())?;
    let ids = Tensor::new(&[[1u32, 2, 3]], &device())?;
    let mut pass = Pass::inference().of_rows(Arc::new([1, 2]));
    let cached = model.forward_with(&ids, Some(&mut cache), &mut pass).expect_err("two rows").to_string();
    assert!(cached.contains("the cache has 1 rows, but the pass has 2"), "{cached}");
    assert_eq!(cache.lengths(), [0], "unchanged");
    model.forward_with(&Tensor::new(&[[1u32; 5]], &device())?, Some(&mut cache), &mut Pass::inference())?;
    let mut pass = Pass::inference().of_rows(Arc::new([3]));
    let full = model.forward_with(&ids, Some(&mut cache), &mut pass).expect_err("a full context").to_string();
    assert!(full.contains('5') && full.contains('3') && full.contains('7'), "{full}");
    assert_eq!(cache.lengths(), [5], "unchanged");
    Ok(())
}

/// Rows that extend a cache by different numbers of tokens match separate runs, as do the caches.
///
/// On a CPU they match bit for bit.
#[test]
fn packed_rows_with_a_cache_equal_the_rows_alone() -> Result<()> {
    let (config, device) = (config(), device());
    // Detached tensors instead of variables, to test the inference kernels.
    let tensors = variables(&config, DType::F32, &device);
    let tensors = tensors.into_iter().map(|(name, variable)| (name, variable.as_tensor().detach())).collect();
    let model = Gpt2Model::load(&config, ByOutput(VarBuilder::from_tensors(tensors, DType::F32, &device)))?;
    let model_of = |ids: &[u32], cache: &mut Gpt2Cache| {
        let ids = Tensor::from_slice(ids, (1, ids.len()), &device)?;
        model.forward_with(&ids, Some(cache), &mut Pass::inference())
    };
    for counts in [[3, 1, 2, 4], [1, 1, 2, 1], [4, 1, 1, 1], [2, 1, 1, 2], [1, 1, 1, 1]] {
        let pool = KvPool::new(&config, 4 * 16, DType::F32, &device)?;
        let mut cache = pool.empty_cache();
        let (mut lengths, mut new) = (Vec::<usize>::new(), Vec::<u32>::new());
        let (mut expected, mut after) = (Vec::new(), Vec::<(u32, Gpt2Cache)>::new());
        for (row, (ids, count)) in ROWS.iter().zip(counts).enumerate() {
            // Each row has cached tokens, then new tokens, then one more token.
            let ids: Vec<u32> = ids.iter().copied().chain([1, 4, 2, 9, 3, 6, 0]).take(7).collect();
            let prefix = [2, 1, 3, 2][row];
            let mut own = Gpt2Cache::new(&config, 1, 7, DType::F32, &device)?;
            let mut of_pool = pool.cache(1, 7).expect("room");
            for cache in [&mut own, &mut of_pool] {
                model_of(&ids[..prefix], cache)?;
            }
            cache.insert(row, of_pool)?;
            new.extend(&ids[prefix..prefix + count]);
            expected.push(model_of(&ids[prefix..prefix + count], &mut own)?);
            after.push((ids[prefix + count], own));
            lengths.push(count);
        }
        let tokens = new.len();
        let new = Tensor::from_vec(new, (1, tokens), &device)?;
        let mut pass = Pass::inference().of_rows(lengths.into());
        let found = model.forward_with(&new, Some(&mut cache), &mut pass)?;
        let what = format!("{counts:?} new tokens");
        same(&found, &Tensor::cat(&expected, 1)?, &what)?;
        assert_eq!(cache.lengths(), [2 + counts[0], 1 + counts[1], 3 + counts[2], 2 + counts[3]], "{what}");
        let next: Vec<u32> = after.iter().map(|(next, _)| *next).collect();
        let found = model.forward_with(
            &Tensor::from_vec(next, (4, 1), &device)?,
            Some(&mut cache),
            &mut Pass::inference(),
        )?;
        for (row, (next, own)) in after.iter_mut().enumerate() {
            same(&found.narrow(0, row, 1)?, &model_of(&[*next], own)?, &format!("row {row} after {what}"))?;
        }
    }
    Ok(())
}

/// Compares bit for bit on a CPU, and within a tolerance elsewhere.
fn same(found: &Tensor, expected: &Tensor, what: &str) -> Result<()> {
    if !found.device().is_cpu() {
        assert_parity(found, expected, SAME, what);
        return Ok(());
    }
    let bits = |x: &Tensor| -> Result<Vec<u32>> {
        Ok(x.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect())
    };
    assert_eq!(bits(found)?, bits(expected)?, "{what}");
    Ok(())
}
