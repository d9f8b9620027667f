//! Reproduces results from chapter 3 of "Build a Large Language Model (From Scratch)", in order.
//!
//! Weights that the book samples from PyTorch's generator come from a fixture (`scripts/reference/layers.py`,
//! `export_steps`). Every expected matrix is from the book.

use candle_core::{Device, IndexOp, Result, Tensor};
use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_attention::steps::{
    CausalAttention, SelfAttention, StackedHeads, attend_one, dot_product, mask_by_renormalizing,
    mask_with_negative_infinity, normalize_by_sum, simple_self_attention, softmax_naive,
};
use candle_gpt2_attention::{AttentionMask, MultiHeadAttention, MultiHeadAttentionConfig, Pass};
use candle_gpt2_kernels::Linear;
use candle_gpt2_testing::{Fixture, assert_close, assert_close_absolute, values};
use candle_nn::ops::softmax;

/// Tolerance for the book's four printed decimal places.
const PRINTED: f64 = 0.5e-4 + 1e-6;
/// Tolerance for f32 sums computed in a different order.
const SAME: f64 = 1e-6;

/// The book's six tokens, "Your journey starts with one step".
fn inputs() -> Result<Tensor> {
    Tensor::new(
        &[
            [0.43f32, 0.15, 0.89],
            [0.55, 0.87, 0.66],
            [0.57, 0.85, 0.64],
            [0.22, 0.58, 0.33],
            [0.77, 0.25, 0.10],
            [0.05, 0.80, 0.55],
        ],
        &Device::Cpu,
    )
}

fn matrix<const COLUMNS: usize>(rows: &[[f32; COLUMNS]]) -> Tensor {
    Tensor::from_slice(rows.as_flattened(), (rows.len(), COLUMNS), &Device::Cpu).unwrap()
}

fn vector(values: &[f32]) -> Tensor {
    Tensor::new(values, &Device::Cpu).unwrap()
}

fn batch_of_two() -> Result<Tensor> {
    Tensor::stack(&[inputs()?, inputs()?], 0)
}

#[test]
fn section_3_3_1_scores_of_one_query() -> Result<()> {
    let inputs = inputs()?;
    let query = inputs.i(1)?;
    assert_close_absolute(
        &dot_product(&inputs.i(0)?, &query)?,
        &Tensor::new(0.9544f32, &Device::Cpu)?,
        PRINTED,
        "dot",
    );
    let scores = inputs.matmul(&query.unsqueeze(1)?)?.flatten_all()?;
    assert_close_absolute(
        &scores,
        &vector(&[0.9544, 1.4950, 1.4754, 0.8434, 0.7070, 1.0865]),
        PRINTED,
        "scores",
    );
    let by_sum = normalize_by_sum(&scores)?;
    assert_close_absolute(
        &by_sum,
        &vector(&[0.1455, 0.2278, 0.2249, 0.1285, 0.1077, 0.1656]),
        PRINTED,
        "by sum",
    );
    let expected = vector(&[0.1385, 0.2379, 0.2333, 0.1240, 0.1082, 0.1581]);
    assert_close_absolute(&softmax_naive(&scores)?, &expected, PRINTED, "naive softmax");
    assert_close_absolute(&softmax(&scores, 0)?, &expected, PRINTED, "softmax");
    Ok(())
}

#[test]
fn section_3_3_2_attention_without_weights() -> Result<()> {
    let attention = simple_self_attention(&inputs()?)?;
    let scores = matrix(&[
        [0.9995, 0.9544, 0.9422, 0.4753, 0.4576, 0.6310],
        [0.9544, 1.4950, 1.4754, 0.8434, 0.7070, 1.0865],
        [0.9422, 1.4754, 1.4570, 0.8296, 0.7154, 1.0605],
        [0.4753, 0.8434, 0.8296, 0.4937, 0.3474, 0.6565],
        [0.4576, 0.7070, 0.7154, 0.3474, 0.6654, 0.2935],
        [0.6310, 1.0865, 1.0605, 0.6565, 0.2935, 0.9450],
    ]);
    let weights = matrix(&[
        [0.2098, 0.2006, 0.1981, 0.1242, 0.1220, 0.1452],
        [0.1385, 0.2379, 0.2333, 0.1240, 0.1082, 0.1581],
        [0.1390, 0.2369, 0.2326, 0.1242, 0.1108, 0.1565],
        [0.1435, 0.2074, 0.2046, 0.1462, 0.1263, 0.1720],
        [0.1526, 0.1958, 0.1975, 0.1367, 0.1879, 0.1295],
        [0.1385, 0.2184, 0.2128, 0.1420, 0.0988, 0.1896],
    ]);
    let context = matrix(&[
        [0.4421, 0.5931, 0.5790],
        [0.4419, 0.6515, 0.5683],
        [0.4431, 0.6496, 0.5671],
        [0.4304, 0.6298, 0.5510],
        [0.4671, 0.5910, 0.5266],
        [0.4177, 0.6503, 0.5645],
    ]);
    assert_close_absolute(&attention.scores, &scores, PRINTED, "scores");
    assert_close_absolute(&attention.weights, &weights, PRINTED, "weights");
    assert_close_absolute(&attention.context, &context, PRINTED, "context");
    Ok(())
}

#[test]
fn section_3_4_1_one_query_step_by_step() -> Result<()> {
    let fixture = Fixture::open("steps");
    let [w_query, w_key, w_value] =
        ["W_query", "W_key", "W_value"].map(|name| fixture.tensor(&format!("self_attention_v1.{name}")));
    let inputs = inputs()?;
    let second = inputs.i(1..2)?;
    let row = |matrix: &Tensor| second.matmul(matrix)?.flatten_all();
    assert_close_absolute(&row(&w_query)?, &vector(&[0.4306, 1.4551]), PRINTED, "query 2");
    assert_close_absolute(&row(&w_key)?, &vector(&[0.4433, 1.1419]), PRINTED, "key 2");
    assert_close_absolute(&row(&w_value)?, &vector(&[0.3951, 1.0037]), PRINTED, "value 2");

    let (keys, values) = (inputs.matmul(&w_key)?, inputs.matmul(&w_value)?);
    let scores = second.matmul(&w_query)?.matmul(&keys.t()?)?.flatten_all()?;
    assert_close_absolute(
        &scores,
        &vector(&[1.2705, 1.8524, 1.8111, 1.0795, 0.5577, 1.5440]),
        PRINTED,
        "scores",
    );
    let weights = softmax(&(scores / 2f64.sqrt())?, 0)?;
    assert_close_absolute(
        &weights,
        &vector(&[0.1500, 0.2264, 0.2199, 0.1311, 0.0906, 0.1820]),
        PRINTED,
        "weights",
    );
    let context = attend_one(&row(&w_query)?, &keys, &values)?;
    assert_close_absolute(&context, &vector(&[0.3061, 0.8210]), PRINTED, "context 2");
    Ok(())
}

#[test]
fn section_3_4_2_self_attention_v1_over_matrices() -> Result<()> {
    let fixture = Fixture::open("steps");
    let [query, key, value] =
        ["W_query", "W_key", "W_value"].map(|name| fixture.tensor(&format!("self_attention_v1.{name}")));
    let output = SelfAttention::from_matrices(&query, &key, &value)?.forward(&inputs()?)?;
    let expected = matrix(&[
        [0.2996, 0.8053],
        [0.3061, 0.8210],
        [0.3058, 0.8203],
        [0.2948, 0.7939],
        [0.2927, 0.7891],
        [0.2990, 0.8040],
    ]);
    assert_close_absolute(&output, &expected, PRINTED, "SelfAttention_v1");
    Ok(())
}

#[test]
fn section_3_4_2_self_attention_v2_over_linear_layers() -> Result<()> {
    let fixture = Fixture::open("steps");
    let layer = SelfAttention::load(3, 2, fixture.parameters("self_attention_v2."))?;
    let expected = matrix(&[
        [-0.0739, 0.0713],
        [-0.0748, 0.0703],
        [-0.0749, 0.0702],
        [-0.0760, 0.0685],
        [-0.0763, 0.0679],
        [-0.0754, 0.0693],
    ]);
    assert_close_absolute(&layer.forward(&inputs()?)?, &expected, PRINTED, "SelfAttention_v2");
    // With a batch, the book's softmax over dim=1 uses the wrong axis. This layer gives the same result
    // for each row of the batch.
    let batched = layer.forward(&batch_of_two()?)?;
    assert_close_absolute(&batched.i(1)?, &expected, PRINTED, "SelfAttention_v2 on a batch");
    Ok(())
}

#[test]
fn exercise_3_1_moves_the_weights_from_v2_to_v1() -> Result<()> {
    let fixture = Fixture::open("steps");
    let v2 = SelfAttention::load(3, 2, fixture.parameters("exercise_3_1."))?;
    let [query, key, value] = v2.matrices()?;
    assert_eq!(query.dims(), [3, 2]);
    let v1 = SelfAttention::from_matrices(&query, &key, &value)?;
    let expected = matrix(&[
        [-0.5337, -0.1051],
        [-0.5323, -0.1080],
        [-0.5323, -0.1079],
        [-0.5297, -0.1076],
        [-0.5311, -0.1066],
        [-0.5299, -0.1081],
    ]);
    assert_close_absolute(&v2.forward(&inputs()?)?, &expected, PRINTED, "v2");
    assert_close_absolute(&v1.forward(&inputs()?)?, &expected, PRINTED, "v1 with the weights of v2");
    Ok(())
}

#[test]
fn section_3_5_1_both_masking_methods_agree() -> Result<()> {
    let fixture = Fixture::open("steps");
    let layer = SelfAttention::load(3, 2, fixture.parameters("self_attention_v2."))?;
    let weights = layer.weights(&inputs()?)?;
    let printed_weights = matrix(&[
        [0.1921, 0.1646, 0.1652, 0.1550, 0.1721, 0.1510],
        [0.2041, 0.1659, 0.1662, 0.1496, 0.1665, 0.1477],
        [0.2036, 0.1659, 0.1662, 0.1498, 0.1664, 0.1480],
        [0.1869, 0.1667, 0.1668, 0.1571, 0.1661, 0.1564],
        [0.1830, 0.1669, 0.1670, 0.1588, 0.1658, 0.1585],
        [0.1935, 0.1663, 0.1666, 0.1542, 0.1666, 0.1529],
    ]);
    assert_close_absolute(&weights, &printed_weights, PRINTED, "weights before masking");

    let scores = layer.scores(&inputs()?)?;
    let masked = mask_with_negative_infinity(&scores)?;
    let hidden = f32::NEG_INFINITY;
    let printed_scores = matrix(&[
        [0.2899, hidden, hidden, hidden, hidden, hidden],
        [0.4656, 0.1723, hidden, hidden, hidden, hidden],
        [0.4594, 0.1703, 0.1731, hidden, hidden, hidden],
        [0.2642, 0.1024, 0.1036, 0.0186, hidden, hidden],
        [0.2183, 0.0874, 0.0882, 0.0177, 0.0786, hidden],
        [0.3408, 0.1270, 0.1290, 0.0198, 0.1290, 0.0078],
    ]);
    assert_close_absolute(&masked, &printed_scores, PRINTED, "masked scores");

    let printed_masked_weights = matrix(&[
        [1.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
        [0.5517, 0.4483, 0.0000, 0.0000, 0.0000, 0.0000],
        [0.3800, 0.3097, 0.3103, 0.0000, 0.0000, 0.0000],
        [0.2758, 0.2460, 0.2462, 0.2319, 0.0000, 0.0000],
        [0.2175, 0.1983, 0.1984, 0.1888, 0.1971, 0.0000],
        [0.1935, 0.1663, 0.1666, 0.1542, 0.1666, 0.1529],
    ]);
    let printed_zeroed_weights = matrix(&[
        [0.1921, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
        [0.2041, 0.1659, 0.0000, 0.0000, 0.0000, 0.0000],
        [0.2036, 0.1659, 0.1662, 0.0000, 0.0000, 0.0000],
        [0.1869, 0.1667, 0.1668, 0.1571, 0.0000, 0.0000],
        [0.1830, 0.1669, 0.1670, 0.1588, 0.1658, 0.0000],
        [0.1935, 0.1663, 0.1666, 0.1542, 0.1666, 0.1529],
    ]);
    let lower = Tensor::tril2(6, candle_core::DType::F32, &Device::Cpu)?;
    assert_close_absolute(&(&weights * lower)?, &printed_zeroed_weights, PRINTED, "weights with zeros above");
    let renormalized = mask_by_renormalizing(&weights)?;
    let infinite = softmax(&(masked / 2f64.sqrt())?, 1)?;
    assert_close_absolute(&renormalized, &printed_masked_weights, PRINTED, "masked by renormalizing");
    assert_close_absolute(&infinite, &printed_masked_weights, PRINTED, "masked by -inf");
    assert_close_absolute(&renormalized, &infinite, SAME, "renormalizing and -inf");
    Ok(())
}

/// The book's dropout matrices: PyTorch's generator picks the positions, but the arithmetic is fixed.
#[test]
fn section_3_5_2_printed_dropout_zeroes_or_doubles_weights() -> Result<()> {
    let fixture = Fixture::open("steps");
    let layer = SelfAttention::load(3, 2, fixture.parameters("self_attention_v2."))?;
    let weights = softmax(&(mask_with_negative_infinity(&layer.scores(&inputs()?)?)? / 2f64.sqrt())?, 1)?;
    let printed_mask = matrix(&[
        [2., 2., 2., 2., 2., 2.],
        [0., 2., 0., 0., 0., 0.],
        [0., 0., 2., 0., 2., 0.],
        [2., 2., 0., 0., 0., 2.],
        [2., 0., 0., 0., 0., 2.],
        [0., 2., 0., 0., 0., 0.],
    ]);
    let printed_weights = matrix(&[
        [2.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
        [0.0000, 0.8966, 0.0000, 0.0000, 0.0000, 0.0000],
        [0.0000, 0.0000, 0.6206, 0.0000, 0.0000, 0.0000],
        [0.5517, 0.4921, 0.0000, 0.0000, 0.0000, 0.0000],
        [0.4350, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
        [0.0000, 0.3327, 0.0000, 0.0000, 0.0000, 0.0000],
    ]);
    assert_close_absolute(&(&weights * printed_mask)?, &printed_weights, PRINTED, "the printed mask");
    let ours = candle_gpt2_kernels::dropout(&weights, 0.5, &mut RandomStream::new(123))?;
    for (dropped, weight) in values(&ours).iter().zip(values(&weights)) {
        assert!(*dropped == 0.0 || (dropped - 2.0 * weight).abs() < SAME, "{weight} became {dropped}");
    }
    Ok(())
}

#[test]
fn section_3_5_2_dropout_doubles_kept_attention_weights() -> Result<()> {
    let fixture = Fixture::open("steps");
    let projections = SelfAttention::load(3, 2, fixture.parameters("causal_attention."))?;
    let layer = CausalAttention::new(projections, 0.5);
    let kept = layer.forward(&batch_of_two()?, &mut Pass::inference())?;
    let mut seen = [false; 2];
    for seed in 0..8 {
        let mut generator = RandomStream::new(seed);
        let dropped = layer.forward(&batch_of_two()?, &mut Pass::training(&mut generator))?;
        // The first token sees only itself, with weight 1, which dropout changes to 0 or 2.
        let (first, plain) = (values(&dropped.i((0, 0))?), values(&kept.i((0, 0))?));
        let ratio = first[0] / plain[0];
        assert!(ratio == 0.0 || (ratio - 2.0).abs() < SAME, "ratio {ratio}");
        seen[usize::from(ratio != 0.0)] = true;
    }
    assert_eq!(seen, [true, true], "both outcomes occur");
    Ok(())
}

#[test]
fn section_3_5_3_causal_attention_on_a_batch() -> Result<()> {
    let fixture = Fixture::open("steps");
    let projections = SelfAttention::load(3, 2, fixture.parameters("causal_attention."))?;
    let layer = CausalAttention::new(projections, 0.0);
    let output = layer.forward(&batch_of_two()?, &mut Pass::inference())?;
    let expected = matrix(&[
        [-0.4519, 0.2216],
        [-0.5874, 0.0058],
        [-0.6300, -0.0632],
        [-0.5675, -0.0843],
        [-0.5526, -0.0981],
        [-0.5299, -0.1081],
    ]);
    for row in 0..2 {
        assert_close_absolute(&output.i(row)?, &expected, PRINTED, "CausalAttention");
    }
    Ok(())
}

fn stacked(fixture: &Fixture, prefix: &str, d_out: usize) -> Result<StackedHeads> {
    let head = |index: usize| -> Result<CausalAttention> {
        let vb = fixture.parameters(&format!("{prefix}.heads.{index}."));
        Ok(CausalAttention::new(SelfAttention::load(3, d_out, vb.clone())?, 0.0))
    };
    Ok(StackedHeads::new(vec![head(0)?, head(1)?]))
}

#[test]
fn section_3_6_1_stacked_heads_and_exercise_3_2() -> Result<()> {
    let fixture = Fixture::open("steps");
    let x = batch_of_two()?;
    let output = stacked(&fixture, "wrapper", 2)?.forward(&x, &mut Pass::inference())?;
    let expected = matrix(&[
        [-0.4519, 0.2216, 0.4772, 0.1063],
        [-0.5874, 0.0058, 0.5891, 0.3257],
        [-0.6300, -0.0632, 0.6202, 0.3860],
        [-0.5675, -0.0843, 0.5478, 0.3589],
        [-0.5526, -0.0981, 0.5321, 0.3428],
        [-0.5299, -0.1081, 0.5077, 0.3493],
    ]);
    assert_close_absolute(&output.i(1)?, &expected, PRINTED, "two heads of two");

    let output = stacked(&fixture, "exercise_3_2", 1)?.forward(&x, &mut Pass::inference())?;
    let expected = matrix(&[
        [-0.5740, 0.2216],
        [-0.7320, 0.0155],
        [-0.7774, -0.0546],
        [-0.6979, -0.0817],
        [-0.6538, -0.0957],
        [-0.6424, -0.1065],
    ]);
    assert_close_absolute(&output.i(0)?, &expected, PRINTED, "two heads of one");
    Ok(())
}

#[test]
fn section_3_6_2_multi_head_attention() -> Result<()> {
    let fixture = Fixture::open("steps");
    let config = MultiHeadAttentionConfig::new(3, 2, 2);
    let layer = MultiHeadAttention::load(&config, fixture.parameters("multi_head_attention."))?;
    let output = layer.forward_masked(&batch_of_two()?, &AttentionMask::Causal)?;
    let expected = matrix(&[
        [0.3190, 0.4858],
        [0.2943, 0.3897],
        [0.2856, 0.3593],
        [0.2693, 0.3873],
        [0.2639, 0.3928],
        [0.2575, 0.4028],
    ]);
    for row in 0..2 {
        assert_close_absolute(&output.i(row)?, &expected, PRINTED, "MultiHeadAttention");
    }
    Ok(())
}

#[test]
fn section_3_6_2_batched_products_match_each_head() -> Result<()> {
    let a = Tensor::new(
        &[
            [
                [0.2745f32, 0.6584, 0.2775, 0.8573],
                [0.8993, 0.0390, 0.9268, 0.7388],
                [0.7179, 0.7058, 0.9156, 0.4340],
            ],
            [
                [0.0772, 0.3565, 0.1479, 0.5331],
                [0.4066, 0.2318, 0.4545, 0.9737],
                [0.4606, 0.5159, 0.4220, 0.5786],
            ],
        ],
        &Device::Cpu,
    )?
    .unsqueeze(0)?;
    let first = [[1.3208f32, 1.1631, 1.2879], [1.1631, 2.2150, 1.8424], [1.2879, 1.8424, 2.0402]];
    let second = [[0.4391f32, 0.7003, 0.5903], [0.7003, 1.3737, 1.0620], [0.5903, 1.0620, 0.9912]];
    let products = a.matmul(&a.transpose(2, 3)?)?;
    // The printed inputs are rounded to four decimal places too, which affects each of the four products.
    assert_close_absolute(&products.i((0, 0))?, &matrix(&first), 3.0 * PRINTED, "first head");
    assert_close_absolute(&products.i((0, 1))?, &matrix(&second), 3.0 * PRINTED, "second head");
    Ok(())
}

/// Stacked projections and an identity as the output projection give the same result as stacked heads.
#[test]
fn stacked_heads_equal_split_heads() -> Result<()> {
    let fixture = Fixture::open("steps");
    let x = batch_of_two()?;
    let stacked = stacked(&fixture, "wrapper", 2)?.forward(&x, &mut Pass::inference())?;
    let block = |name: &str| -> Result<Linear> {
        let head = |index: usize| fixture.tensor(&format!("wrapper.heads.{index}.{name}.weight"));
        Linear::new(Tensor::cat(&[head(0), head(1)], 0)?, None)
    };
    let projection = candle_gpt2_attention::QkvProjection::Separate {
        query: block("W_query")?,
        key: block("W_key")?,
        value: block("W_value")?,
    };
    let identity = Linear::new(Tensor::eye(4, candle_core::DType::F32, &Device::Cpu)?, None)?;
    let split =
        MultiHeadAttention::new(projection, identity, 2)?.forward_masked(&x, &AttentionMask::Causal)?;
    assert_close(&split, &stacked, SAME, "split heads");
    Ok(())
}

/// Exercise 3.3: the parameter count of an attention layer in the smallest GPT-2.
#[test]
fn exercise_3_3_counts_the_parameters_of_gpt2() -> Result<()> {
    let count = |qkv_bias: bool| -> Result<usize> {
        let parameters = candle_nn::VarMap::new();
        let vb = candle_nn::VarBuilder::from_varmap(&parameters, candle_core::DType::F32, &Device::Cpu);
        let config = MultiHeadAttentionConfig { qkv_bias, ..MultiHeadAttentionConfig::new(768, 768, 12) };
        let layer = MultiHeadAttention::load(&config, vb.clone())?;
        assert_eq!((layer.num_heads(), layer.head_dim()), (12, 64));
        let stored: usize = parameters.all_vars().iter().map(|parameter| parameter.elem_count()).sum();
        assert_eq!(layer.parameter_count(), stored);
        Ok(stored)
    };
    assert_eq!(count(false)?, 2_360_064);
    assert_eq!(count(true)?, 2_362_368);
    Ok(())
}
