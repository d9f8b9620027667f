//! Tests of dictionaries against manual results, plain loops, PyTorch, and SAELens and OpenAI files.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use candle_core::{Device, Tensor, Var};
use candle_gpt2::{Gpt2Config, Site, SiteKind};
use candle_gpt2_interpret::{
    ActivationVariant, Dictionary, DictionaryConfig, DictionaryFormat, LatentActivation, Processing,
    openai_site,
};
use candle_gpt2_testing::{Fixture, assert_close_absolute, fixture_path, pattern, table, values};
use candle_gpt2_weights::TensorFile;
use serde_json::{Value, json};

use crate::common::Case;

/// Tolerance for sums of a dozen products in f32.
const ROUNDING: f64 = 2e-5;

type Tensors = BTreeMap<String, Tensor>;

fn fixture(name: &str) -> PathBuf {
    fixture_path("dictionaries").join(name)
}

fn rows(rows: &[&[f32]]) -> Tensor {
    let width = rows[0].len();
    Tensor::from_vec(rows.concat(), (rows.len(), width), &Device::Cpu).unwrap()
}

fn vector(values: &[f32]) -> Tensor {
    Tensor::new(values, &Device::Cpu).unwrap()
}

/// Tensors for inputs of width 2 and three latents.
fn small_tensors() -> Tensors {
    let tensors = [
        ("W_enc", rows(&[&[1., 0., -1.], &[0., 2., 1.]])),
        ("b_enc", vector(&[0., -1., 0.5])),
        ("W_dec", rows(&[&[1., 0.], &[0., 1.], &[2., -1.]])),
        ("b_dec", vector(&[1., 0.])),
        ("threshold", vector(&[2., 1., 0.4])),
    ];
    tensors.map(|(name, tensor)| (name.to_owned(), tensor)).into()
}

fn small_config(activation: LatentActivation) -> DictionaryConfig {
    DictionaryConfig {
        site: Site::in_block(1, SiteKind::ResidPre),
        output: None,
        format: DictionaryFormat::SaeLens,
        d_in: Some(2),
        d_sae: Some(3),
        activation,
        subtracts_bias: true,
        normalizes_input: false,
        scales_by_direction: false,
        prepends_bos: Some(true),
        trained_on: ActivationVariant::Checkpoint,
        trained_on_because: "it is a test",
    }
}

fn small(activation: LatentActivation) -> Dictionary {
    Dictionary::from_tensors(&small_tensors(), &small_config(activation)).unwrap()
}

#[test]
fn latents_and_outputs_match_manual_computation() {
    let x = rows(&[&[3., 2.], &[0., -1.]]);
    for (activation, latents, output) in [
        (LatentActivation::Relu, [2., 3., 0.5, 0., 0., 0.5], [4., 2.5, 2., -0.5]),
        (LatentActivation::TopK { k: 1 }, [0., 3., 0., 0., 0., 0.5], [1., 3., 2., -0.5]),
        // The second largest value of the second row is negative.
        (LatentActivation::TopK { k: 2 }, [2., 3., 0., 0., 0., 0.5], [3., 3., 2., -0.5]),
        (LatentActivation::TopK { k: 3 }, [2., 3., 0.5, 0., 0., 0.5], [4., 2.5, 2., -0.5]),
        // A value equal to its threshold does not exceed it.
        (LatentActivation::JumpRelu, [0., 3., 0.5, 0., 0., 0.5], [2., 2.5, 2., -0.5]),
    ] {
        let dictionary = small(activation);
        assert_eq!(values(&dictionary.encode(&x).unwrap()), latents, "{activation:?}");
        assert_eq!(values(&dictionary.reconstruct(&x).unwrap()), output, "{activation:?}");
    }
    let config = DictionaryConfig { subtracts_bias: false, ..small_config(LatentActivation::Relu) };
    let dictionary = Dictionary::from_tensors(&small_tensors(), &config).unwrap();
    assert_eq!(values(&dictionary.encode(&x).unwrap()), [3., 3., 0., 0., 0., 0.]);
    assert_eq!(values(&dictionary.direction(2).unwrap()), [2., -1.]);
}

#[test]
fn top_k_ties_keep_the_first_latents() {
    let mut tensors = small_tensors();
    tensors.insert("W_enc".into(), rows(&[&[1., 1., 1.], &[0., 0., 0.]]));
    tensors.insert("b_enc".into(), vector(&[0., 0., 0.]));
    let config = small_config(LatentActivation::TopK { k: 2 });
    let dictionary = Dictionary::from_tensors(&tensors, &config).unwrap();
    assert_eq!(values(&dictionary.encode(&rows(&[&[5., 0.]])).unwrap()), [4., 4., 0.]);
}

#[test]
fn explained_variance_matches_manual_computation() {
    let dictionary = small(LatentActivation::Relu);
    let explained = dictionary.explained(&rows(&[&[3., 2.], &[0., -1.]])).unwrap();
    assert_eq!(explained.mean_l0, 2.0);
    assert_eq!(explained.mse, 5.5 / 4.0);
    assert_eq!(explained.variance_explained, Some(1.0 - 5.5 / 9.0));
    // A single row has no variance.
    let explained = dictionary.explained(&vector(&[3., 2.])).unwrap();
    assert_eq!((explained.mean_l0, explained.mse), (3.0, 1.25 / 2.0));
    assert_eq!(explained.variance_explained, None);
}

/// Reference encoder and decoder that compute one value at a time in f64.
struct Slow<'a> {
    tensors: &'a Tensors,
    config: &'a DictionaryConfig,
}

impl Slow<'_> {
    fn get(&self, name: &str) -> Vec<f64> {
        values(&self.tensors[name])
    }

    fn latents_and_output(&self, x: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let [encoder, encoder_bias, decoder, decoder_bias] =
            ["W_enc", "b_enc", "W_dec", "b_dec"].map(|name| self.get(name));
        let (width, count) = (decoder_bias.len(), encoder_bias.len());
        let mean = x.iter().sum::<f64>() / width as f64;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (width as f64 - 1.0);
        let (mean, deviation, scale) = if self.config.normalizes_input {
            (mean, variance.sqrt(), variance.sqrt() + 1e-5)
        } else {
            (0.0, 1.0, 1.0)
        };
        let mut latents = Vec::new();
        for latent in 0..count {
            let mut sum = encoder_bias[latent];
            for axis in 0..width {
                let shift = if self.config.subtracts_bias { decoder_bias[axis] } else { 0.0 };
                sum += ((x[axis] - mean) / scale - shift) * encoder[axis * count + latent];
            }
            latents.push(sum);
        }
        let before = latents.clone();
        for (latent, value) in latents.iter_mut().enumerate() {
            let is_active = match self.config.activation {
                LatentActivation::TopK { k } => before.iter().filter(|other| **other > *value).count() < k,
                LatentActivation::JumpRelu => *value > self.get("threshold")[latent],
                LatentActivation::Relu => true,
                LatentActivation::Gated => unreachable!("a gate has its own tensors"),
            };
            *value = if is_active { value.max(0.0) } else { 0.0 };
        }
        let output = (0..width).map(|axis| {
            let sum: f64 = (0..count).map(|latent| latents[latent] * decoder[latent * width + axis]).sum();
            (sum + decoder_bias[axis]) * deviation + mean
        });
        let output = output.collect();
        (latents, output)
    }
}

#[test]
fn every_activation_and_option_matches_a_plain_loop() {
    let tensors: Tensors = [
        ("W_enc", pattern(&[7, 11], 1.0, 1)),
        ("b_enc", pattern(&[11], 1.0, 2)),
        ("W_dec", pattern(&[11, 7], 1.0, 3)),
        ("b_dec", pattern(&[7], 1.0, 4)),
        ("threshold", pattern(&[11], 0.5, 5).abs().unwrap()),
    ]
    .map(|(name, tensor)| (name.to_owned(), tensor))
    .into();
    let x = pattern(&[2, 5, 7], 3.0, 6).affine(1.0, 0.5).unwrap();
    for activation in [LatentActivation::Relu, LatentActivation::TopK { k: 4 }, LatentActivation::JumpRelu] {
        for (subtracts_bias, normalizes_input) in [(true, false), (false, false), (true, true), (false, true)]
        {
            let config = DictionaryConfig {
                d_in: None,
                d_sae: None,
                subtracts_bias,
                normalizes_input,
                ..small_config(activation)
            };
            let what = format!("{activation:?}, bias {subtracts_bias}, normalized {normalizes_input}");
            let dictionary = Dictionary::from_tensors(&tensors, &config).unwrap();
            assert_eq!((dictionary.width(), dictionary.latents()), (7, 11));
            assert_eq!(dictionary.config().d_in.zip(dictionary.config().d_sae), Some((7, 11)));
            let slow = Slow { tensors: &tensors, config: &config };
            let (slow_latents, slow_output): (Vec<_>, Vec<_>) =
                values(&x).chunks(7).map(|x| slow.latents_and_output(x)).unzip();
            let tensor = |rows: Vec<Vec<f64>>, width: usize| {
                Tensor::from_vec(rows.concat(), (2, 5, width), &Device::Cpu).unwrap()
            };
            let latents = dictionary.encode(&x).unwrap();
            assert_close_absolute(&latents, &tensor(slow_latents, 11), ROUNDING, &what);
            let output = dictionary.decode(&latents, &x).unwrap();
            assert_close_absolute(&output, &tensor(slow_output, 7), ROUNDING, &what);
        }
    }
}

/// Checks gradients through latents; attribution to latents needs them.
#[test]
fn gradients_flow_through_active_latents_only() {
    for (activation, expected) in
        [(LatentActivation::TopK { k: 1 }, [0., 2.]), (LatentActivation::JumpRelu, [-1., 3.])]
    {
        let x = Var::from_tensor(&vector(&[3., 2.])).unwrap();
        let latents = small(activation).encode(x.as_tensor()).unwrap();
        let gradients = latents.sum_all().unwrap().backward().unwrap();
        assert_eq!(values(gradients.get(&x).unwrap()), expected, "{activation:?}");
    }
}

fn saelens(name: &str) -> Dictionary {
    let folder = fixture(&format!("saelens-{name}"));
    let config = std::fs::read_to_string(folder.join("cfg.json")).unwrap();
    let file = TensorFile::read(&folder.join("sae_weights.safetensors")).unwrap();
    Dictionary::from_tensors(&file.tensors, &DictionaryConfig::from_json(&config).unwrap()).unwrap()
}

#[track_caller]
fn assert_expected(dictionary: &Dictionary, name: &str) {
    let expected = Fixture::open("dictionaries/expected");
    let of = |part: &str| expected.tensor(&format!("{name}.{part}"));
    let latents = dictionary.encode(&of("input")).unwrap();
    assert_close_absolute(&latents, &of("latents"), ROUNDING, name);
    // Active latents equal their pre-activations.
    let before = values(&dictionary.pre_activations(&of("input")).unwrap());
    let active = values(&latents);
    assert!(before.iter().zip(&active).all(|(before, latent)| *latent == 0.0 || latent == before), "{name}");
    assert!(before.iter().any(|before| *before < 0.0), "{name}");
    let output = dictionary.decode(&latents, &of("input")).unwrap();
    assert_close_absolute(&output, &of("output"), ROUNDING, name);
}

#[test]
fn saelens_dictionaries_match_saelens() {
    let site = |layer, kind| Site::in_block(layer, kind);
    for (name, site, activation, prepends_bos) in [
        ("plain", site(1, SiteKind::ResidPre), LatentActivation::Relu, true),
        ("topk", site(0, SiteKind::MlpOut), LatentActivation::TopK { k: 3 }, false),
        ("jumprelu", site(1, SiteKind::ResidPost), LatentActivation::JumpRelu, true),
        ("gated", site(1, SiteKind::ResidPre), LatentActivation::Gated, true),
        ("transcoder", site(1, SiteKind::Ln2Normalized), LatentActivation::Relu, true),
        ("jumprelu-skip-transcoder", site(0, SiteKind::ResidMid), LatentActivation::JumpRelu, true),
    ] {
        let dictionary = saelens(name);
        assert_expected(&dictionary, name);
        let config = dictionary.config();
        assert_eq!((config.site, config.activation), (site, activation), "{name}");
        assert_eq!(config.prepends_bos, Some(prepends_bos), "{name}");
        let is_centered = ["plain", "jumprelu"].contains(&name);
        assert_eq!(config.needs_centering(), is_centered, "{name}: {}", config.trained_on_because);
        let architecture = if name == "plain" { "standard".to_owned() } else { name.replace('-', "_") };
        assert_eq!(config.architecture(), architecture);
        // The tensors equal those in the file, except that a gate is folded in.
        let file =
            TensorFile::read(&fixture(&format!("saelens-{name}")).join("sae_weights.safetensors")).unwrap();
        for tensor in ["W_enc", "b_enc", "W_dec", "b_dec", "threshold"] {
            let found = dictionary.tensor(tensor);
            if name != "gated" || tensor.ends_with("dec") {
                let stored = file.tensors.get(tensor);
                assert_eq!(found.map(values), stored.map(values), "{name}: {tensor}");
            } else {
                assert_eq!(found.unwrap().dims().last(), Some(&dictionary.latents()), "{tensor}");
            }
        }
        assert!(dictionary.tensor("W_skip").is_none());
    }
}

#[test]
fn transcoder_reads_and_explains_different_hook_points() {
    let dictionary = saelens("jumprelu-skip-transcoder");
    assert_eq!((dictionary.width(), dictionary.output_width()), (6, 7));
    assert_eq!(dictionary.explained_site(), Site::in_block(0, SiteKind::MlpOut));
    assert!(dictionary.config().output.unwrap().skips && !dictionary.config().subtracts_bias);
    let expected = Fixture::open("dictionaries/expected");
    let of = |part: &str| expected.tensor(&format!("jumprelu-skip-transcoder.{part}"));
    let shifted = (of("output") + 0.5).unwrap();
    let explained = dictionary.explained_target(&of("input"), &shifted).unwrap();
    assert!((explained.mse - 0.25).abs() < 1e-4, "{explained:?}");

    let model = Gpt2Config { n_embd: 6, n_layer: 1, n_head: 1, ..Gpt2Config::gpt2() };
    let message = dictionary.check_model(&model).unwrap_err().to_string();
    assert!(message.contains("width 7, but the model has width 6 at blocks.0.hook_mlp_out"), "{message}");
    let message = saelens("transcoder").check_model(&model).unwrap_err().to_string();
    assert!(message.contains("block 1 is out of range"), "{message}");
}

/// Checks that folding direction norms yields unit directions and the same results.
///
/// The latents are scaled by the norms of their directions, as when SAELens folds the norms.
#[test]
fn direction_norms_are_folded() {
    let dictionary = saelens("rescaled");
    assert_expected(&dictionary, "rescaled");
    for latent in 0..dictionary.latents() {
        let length = values(&dictionary.direction(latent).unwrap().sqr().unwrap().sum_all().unwrap())[0];
        assert!((length - 1.0).abs() < 1e-6, "latent {latent}: {length}");
    }
}

#[test]
fn openai_dictionaries_match_openai_formulas() {
    for (name, folder, kind) in
        [("topk", "resid_post_mlp_v5_32k", SiteKind::ResidPost), ("relu", "mlp_post_act", SiteKind::MlpPost)]
    {
        let file = TensorFile::read(&fixture(&format!("openai-{name}.pt"))).unwrap();
        let site = openai_site(folder, 8).unwrap();
        assert_eq!(site, Site::in_block(8, kind));
        let config = DictionaryConfig::openai(&file.entries, site).unwrap();
        assert!(!config.needs_centering());
        assert_eq!(config.normalizes_input, name == "topk");
        assert_expected(
            &Dictionary::from_tensors(&file.tensors, &config).unwrap(),
            &format!("openai-{name}"),
        );
        assert_eq!(file.left_out[0].name, "stats_last_nonzero");
    }
    for (folder, kind) in [
        ("resid_delta_attn_v5_128k", SiteKind::AttnOut),
        ("resid_post_attn_v5_32k", SiteKind::ResidMid),
        ("resid_delta_mlp_v4", SiteKind::MlpOut),
    ] {
        assert_eq!(openai_site(folder, 0), Some(Site::in_block(0, kind)));
    }
    assert_eq!(openai_site("resid", 0), None);
}

#[test]
fn saved_dictionary_reconstructs_identically() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sae_weights.safetensors");
    let tensors: HashMap<String, Tensor> = small_tensors().into_iter().collect();
    candle_core::safetensors::save(&tensors, &path).unwrap();
    let read = TensorFile::read(&path).unwrap().tensors;
    let x = pattern(&[4, 2], 3.0, 7);
    for activation in [LatentActivation::Relu, LatentActivation::JumpRelu] {
        let dictionary = Dictionary::from_tensors(&read, &small_config(activation)).unwrap();
        let [read, in_memory] =
            [&dictionary, &small(activation)].map(|each| values(&each.reconstruct(&x).unwrap()));
        assert_eq!(read, in_memory);
    }
}

/// Checks that inputs get TransformerLens' processing if the configuration requires it.
#[test]
fn input_follows_transformer_lens_processing() {
    let case = Case::open("plain");
    let processing = Processing::new(&case.model).unwrap();
    let model = case.model.config();
    let (heads, width) = (model.n_head * model.head_dim(), model.n_embd);
    let dictionary = |name: &str, width: usize, options: Value| {
        let config =
            json!({"hook_name": name, "d_in": width, "d_sae": 5, "model_from_pretrained_kwargs": options});
        let tensors = [
            ("W_enc", pattern(&[width, 5], 1.0, 1)),
            ("b_enc", pattern(&[5], 1.0, 2)),
            ("W_dec", pattern(&[5, width], 1.0, 3)),
            ("b_dec", pattern(&[width], 1.0, 4)),
        ];
        let tensors = tensors.map(|(name, tensor)| (name.to_owned(), tensor)).into();
        let config = DictionaryConfig::from_json(&config.to_string()).unwrap();
        let dictionary = Dictionary::from_tensors(&tensors, &config).unwrap();
        dictionary.check_model(model).unwrap();
        dictionary
    };
    for (name, width, option) in [
        ("blocks.1.hook_resid_post", width, "center_writing_weights"),
        ("blocks.0.hook_attn_out", width, "center_writing_weights"),
        ("blocks.1.attn.hook_z", heads, "fold_value_biases"),
        ("blocks.0.mlp.hook_post", model.inner_width(), "center_writing_weights"),
    ] {
        for (options, fixture) in [(json!({}), &case.raw), (json!({option: true}), &case.compat)] {
            let dictionary = dictionary(name, width, options);
            let input = dictionary.input(&case.raw.tensor(name), &processing).unwrap();
            let expected = fixture.tensor(name).reshape((1, (), width)).unwrap();
            assert_close_absolute(&input, &expected, ROUNDING, name);
            assert_eq!(dictionary.encode(&input).unwrap().dims(), [1, case.clean.len(), 5]);
        }
    }
}

/// Parses a valid configuration with these changes.
fn config(changes: Value) -> Result<DictionaryConfig, String> {
    let mut keys = json!({"hook_name": "blocks.8.hook_resid_pre", "d_in": 768, "d_sae": 24_576});
    for (key, value) in changes.as_object().unwrap() {
        keys[key] = value.clone();
    }
    DictionaryConfig::from_json(&keys.to_string()).map_err(|error| error.to_string())
}

/// Covers the keys of gpt2-small-res-jb, SAELens 3 to 6, and the first dictionaries for `z`.
#[test]
fn configs_of_every_version_are_parsed() {
    let oldest = json!({
        "d_in": 768, "d_sae": 24_576, "hook_point": "blocks.6.hook_resid_pre", "hook_point_layer": 6,
        "model_name": "gpt2-small", "dataset_path": "Skylion007/openwebtext", "context_size": 128,
        "dtype": "torch.float32",
    });
    let read = DictionaryConfig::from_json(&oldest.to_string()).unwrap();
    assert_eq!(read.site, Site::in_block(6, SiteKind::ResidPre));
    assert_eq!((read.d_in, read.d_sae, read.activation), (Some(768), Some(24_576), LatentActivation::Relu));
    assert!(read.subtracts_bias && !read.normalizes_input && read.needs_centering());
    assert!(read.trained_on_because.contains("without `model_from_pretrained_kwargs`"));

    let later = json!({"activation_fn_str": "relu", "normalize_activations": null, "model_from_pretrained_kwargs": {}});
    assert_eq!(config(later).unwrap().trained_on, ActivationVariant::Checkpoint);
    let centered = json!({"model_from_pretrained_kwargs": {"center_writing_weights": true}});
    assert!(config(centered).unwrap().needs_centering());
    // For heads, centering depends on a different option.
    let z = json!({"hook_name": "blocks.2.attn.hook_z", "model_from_pretrained_kwargs": {"center_writing_weights": true}});
    assert_eq!(config(z).unwrap().trained_on, ActivationVariant::Checkpoint);
    let newest =
        json!({"hook_name": null, "metadata": {"hook_name": "blocks.2.hook_mlp_out", "prepend_bos": false}});
    let read = config(newest).unwrap();
    assert_eq!((read.site, read.prepends_bos), (Site::in_block(2, SiteKind::MlpOut), Some(false)));
    assert_eq!(read.trained_on, ActivationVariant::Checkpoint);
    assert!(read.trained_on_because.contains("SAELens 6"));

    let of_heads =
        json!({"act_name": "blocks.5.attn.hook_z", "act_size": 768, "dict_size": 24_576, "l1_coeff": 1.8});
    let read = DictionaryConfig::from_json(&of_heads.to_string()).unwrap();
    assert_eq!((read.site, read.d_in), (Site::in_block(5, SiteKind::Z), Some(768)));
    assert!(read.trained_on == ActivationVariant::TransformerLens && !read.needs_centering());
    assert_eq!(
        config(json!({"architecture": "topk", "k": 32})).unwrap().activation,
        LatentActivation::TopK { k: 32 }
    );
}

#[test]
fn unsupported_settings_are_rejected_by_name() {
    for [changes, expected] in table(
        r#"
{"hook_name": null} | `hook_name`: expected the model's hook point
{"hook_name": 8} | `hook_name`: expected a string; found 8
{"hook_name": "blocks.8.hok_resid_pre"} | did you mean `blocks.8.hook_resid_pre`?
{"d_in": null} | `d_in` or `act_size`: expected a positive integer; found nothing
{"d_in": 0} | `d_in`: expected a positive integer; found 0
{"d_sae": 1e30} | `d_sae`: expected a positive integer
{"d_sae": "many"} | `d_sae`: expected a positive integer; found "many"
{"architecture": "temporal"} | `architecture`: expected "standard", "topk", "gated", "jumprelu"
{"architecture": "gated", "activation_fn": "topk"} | `activation_fn`: expected "relu" or "topk"; found "topk"
{"activation_fn": "tanh-relu"} | `activation_fn`: expected "relu" or "topk"; found "tanh-relu"
{"activation_fn_str": "topk"} | `k`: expected a positive integer; found nothing
{"architecture": "topk", "k": 0} | `k`: expected a positive integer; found 0
{"normalize_activations": "expected_average_only_in"} | fold_activation_norm_scaling_factor
{"normalize_activations": true} | `normalize_activations`: expected "none" or "layer_norm"
{"normalize_activations": "constant_norm_rescale"} | found "constant_norm_rescale"
{"apply_b_dec_to_input": "no"} | `apply_b_dec_to_input`: expected true or false; found "no"
{"hook_head_index": 3} | dictionaries of a single head are unsupported); found 3
{"hook_name_out": "blocks.8.hook_mlp_out"} | only a transcoder `architecture` has a separate output
{"architecture": "transcoder"} | `hook_name_out`: expected the hook point that the transcoder reconstructs
{"architecture": "transcoder", "hook_name_out": "blocks.8.mlp"} | unknown hook point `blocks.8.mlp`
{"architecture": "transcoder", "hook_name_out": "blocks.8.hook_mlp_out", "d_out": 0} | `d_out`: expected a positive integer
{"architecture": "skip_transcoder", "hook_name_out": "mlp_out8", "apply_b_dec_to_input": true} | `apply_b_dec_to_input`: expected false
{"architecture": "skip_transcoder", "hook_name_out": "mlp_out8", "activation_fn": "tanh"} | `activation_fn`: expected "relu" or "topk"
"#,
    ) {
        let message = config(serde_json::from_str(changes).unwrap()).unwrap_err();
        assert!(message.contains(expected), "`{expected}` is not in: {message}");
    }
    for text in ["", "{", "[1]", "null", &"[".repeat(100_000)] {
        let message = DictionaryConfig::from_json(text).unwrap_err().to_string();
        assert!(message.starts_with("invalid JSON configuration"), "{message}");
    }
    let entries =
        |pairs: &[(&str, &str)]| pairs.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
    for (pairs, expected) in [
        (
            &[("activation", "Identity")][..],
            "`activation`: expected ReLU, or TopK followed by ReLU; found Identity",
        ),
        (&[("activation", "TopK")], "`activation_state_dict.k`: expected the number of latents to keep"),
        (&[("activation", "TopK"), ("activation_state_dict.k", "0")], "found 0"),
        (
            &[("activation", "TopK"), ("activation_state_dict.postact_fn", "Identity")],
            "`activation_state_dict.postact_fn`",
        ),
    ] {
        let site = Site::in_block(0, SiteKind::ResidPost);
        let message = DictionaryConfig::openai(&entries(pairs), site).unwrap_err().to_string();
        assert!(message.contains(expected), "`{expected}` is not in: {message}");
    }
}

#[test]
fn mismatched_tensors_are_reported_by_name() {
    let error_message = |change: &dyn Fn(&mut Tensors), config: &DictionaryConfig| {
        let mut tensors = small_tensors();
        change(&mut tensors);
        Dictionary::from_tensors(&tensors, config).unwrap_err().to_string()
    };
    let jump = small_config(LatentActivation::JumpRelu);
    let without = |name: &'static str| move |tensors: &mut Tensors| drop(tensors.remove(name));
    let with = |name: &'static str, tensor: Tensor| {
        move |tensors: &mut Tensors| drop(tensors.insert(name.into(), tensor.clone()))
    };
    for (message, expected) in [
        (
            error_message(&without("W_enc"), &jump),
            "tensor `W_enc` is missing: expected shape (width, latents); the file has W_dec, b_dec",
        ),
        (error_message(&without("b_dec"), &jump), "tensor `b_dec` is missing: expected shape (2)"),
        (error_message(&without("threshold"), &jump), "tensor `threshold` is missing: expected shape (3)"),
        (error_message(&|tensors| tensors.clear(), &jump), "the file has no tensors"),
        (
            error_message(&with("W_dec", pattern(&[2, 3], 1., 0)), &jump),
            "tensor `W_dec`: expected shape (3, 2), found (2, 3)",
        ),
        (
            error_message(&with("b_enc", pattern(&[2], 1., 0)), &jump),
            "tensor `b_enc`: expected shape (3), found (2)",
        ),
        (
            error_message(&with("W_enc", pattern(&[6], 1., 0)), &jump),
            "tensor `W_enc`: expected shape (width, latents), found (6)",
        ),
        (
            error_message(&with("W_enc", pattern(&[1, 3], 1., 0)), &jump),
            "tensor `W_enc`: expected shape (width, latents), found (1, 3)",
        ),
        (
            error_message(&with("W_dec", rows(&[&[1., 0.], &[0., f32::NAN], &[2., -1.]])), &jump),
            "tensor `W_dec`: element 3 is NaN; the file is damaged",
        ),
        (
            error_message(&with("scaling_factor", vector(&[1., 1., 2.])), &jump),
            "`scaling_factor`: expected 1 everywhere",
        ),
        (
            error_message(&|_| (), &DictionaryConfig { d_in: Some(4), ..jump.clone() }),
            "tensor `W_enc`: expected shape (4, 3), found (2, 3)",
        ),
        (
            error_message(&|_| (), &small_config(LatentActivation::TopK { k: 4 })),
            "`k`: expected 1 to 3, the number of latents",
        ),
        (
            error_message(&|_| (), &DictionaryConfig { format: DictionaryFormat::OpenAi, ..jump.clone() }),
            "tensor `encoder.weight` is missing: expected shape (latents, width)",
        ),
    ] {
        assert!(message.contains(expected), "`{expected}` is not in: {message}");
    }
    // Scales of 1 change nothing, and training checkpoints store the logarithm of the threshold.
    let mut tensors = small_tensors();
    tensors.insert("scaling_factor".into(), vector(&[1., 1., 1.]));
    let threshold = tensors.remove("threshold").unwrap();
    tensors.insert("log_threshold".into(), threshold.log().unwrap());
    let dictionary = Dictionary::from_tensors(&tensors, &jump).unwrap();
    let latents = dictionary.encode(&rows(&[&[3.5, 2.], &[0., -1.]])).unwrap();
    assert_eq!(values(&latents), [2.5, 3., 0., 0., 0., 0.5]);
}

#[test]
fn mismatched_shapes_and_models_are_rejected() {
    let dictionary = small(LatentActivation::Relu);
    let x = pattern(&[4, 3], 1.0, 0);
    for message in [
        dictionary.encode(&x).unwrap_err().to_string(),
        dictionary.decode(&pattern(&[4, 2], 1.0, 0), &x).unwrap_err().to_string(),
        dictionary.decode(&x, &x).unwrap_err().to_string(),
    ] {
        assert!(
            message
                .contains("blocks.1.hook_resid_pre expects inputs of width 2 or 3 latents, found shape [4, "),
            "{message}"
        );
    }
    let message = dictionary.direction(3).unwrap_err().to_string();
    assert!(
        message.starts_with("latent 3 is out of range; the dictionary has 3 latents, counted from 0"),
        "{message}"
    );

    let model = Gpt2Config { n_embd: 2, n_layer: 2, n_head: 1, n_inner: Some(9), ..Gpt2Config::gpt2() };
    let checked = |site: Site, model: &Gpt2Config| {
        let config = DictionaryConfig { site, ..small_config(LatentActivation::Relu) };
        Dictionary::from_tensors(&small_tensors(), &config)
            .unwrap()
            .check_model(model)
            .map_err(|error| error.to_string())
    };
    for kind in [SiteKind::ResidPost, SiteKind::Z, SiteKind::Ln2Normalized] {
        checked(Site::in_block(1, kind), &model).unwrap();
    }
    for (site, model, expected) in [
        (Site::in_block(2, SiteKind::ResidPre), &model, "block 2 is out of range"),
        (
            Site::in_block(1, SiteKind::MlpPost),
            &model,
            "width 2, but the model has width 9 at blocks.1.mlp.hook_post",
        ),
        (Site::in_block(1, SiteKind::ResidPre), &Gpt2Config::gpt2(), "width 2, but the model has width 768"),
        (Site::in_block(1, SiteKind::Pattern), &model, "has no per-token vector that an SAE can explain"),
    ] {
        let message = checked(site, model).unwrap_err();
        assert!(message.contains(expected), "`{expected}` is not in: {message}");
    }
}
