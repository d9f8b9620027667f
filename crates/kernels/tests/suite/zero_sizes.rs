//! Empty inputs give empty results or errors, but never panics.

use candle_core::{DType, Device, Result, Tensor};
use candle_gpt2_arithmetic::{Dropout, KvSlot, NumberType, RandomStream};
use candle_gpt2_kernels::{
    Activation, HeadsAttention, KvDType, KvMemory, LayerNorm, Linear, Matrix, add, add_positions, composed,
    dropout, head_loss, heads_attention, step_attention,
};
use candle_nn::ops::softmax;

fn zeros(shape: &[usize]) -> Tensor {
    Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap()
}

/// Shape of an operation's result, or `None` for an error.
fn dims(result: Result<Tensor>) -> Option<Vec<usize>> {
    result.ok().map(|tensor| tensor.dims().to_vec())
}

#[test]
fn linear_layers_and_norms() {
    for format in [None, Some(NumberType::F32), Some(NumberType::Q8)] {
        let weight = match format {
            Some(format) => Matrix::pack(&zeros(&[3, 64]), format).unwrap(),
            None => Matrix::Dense(zeros(&[3, 64])),
        };
        let layer = Linear::from_matrix(weight, Some(zeros(&[3]))).unwrap();
        let (x, y) = (zeros(&[2, 0, 64]), Some(vec![2, 0, 3]));
        for found in [
            layer.forward(&x),
            layer.forward_activated(&x, Activation::GeluTanh),
            layer.forward_added(&x, &zeros(&[2, 0, 3])),
            layer.forward_outputs(&x, 0..3),
        ] {
            let found = dims(found);
            assert!(found.is_none() || found == y, "{format:?}: {found:?}");
        }
        #[expect(clippy::reversed_empty_ranges, reason = "the test needs reversed ranges")]
        for outputs in [1..1, 2..4, 3..3, 2..1, 5..usize::MAX] {
            let error = layer.forward_outputs(&zeros(&[1, 64]), outputs.clone()).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("linear layer: outputs {outputs:?} are empty or out of range")),
                "{format:?}: {error}"
            );
        }
    }
    for shape in [[0, 4], [4, 0], [0, 0]] {
        let layer = Linear::new(zeros(&shape), None).unwrap();
        let _ = (
            dims(layer.forward(&zeros(&[2, shape[1]]))),
            dims(layer.embedding(&zeros(&[0]).to_dtype(DType::U32).unwrap())),
        );
        let _ = Matrix::pack(&zeros(&shape), NumberType::Q8);
    }
    let past_the_end = zeros(&[3, 64]).narrow(0, 3, 0).unwrap();
    let _ = (Matrix::pack(&past_the_end, NumberType::Q8), Matrix::pack(&zeros(&[3, 0]), NumberType::F16));
    for (rows, width) in [(0, 4), (3, 0)] {
        let norm = LayerNorm::new(zeros(&[width]), Some(zeros(&[width])), 1e-5);
        let x = zeros(&[rows, width]);
        for found in
            [norm.forward(&x), composed(|| norm.forward(&x)), norm.centered(&x).map(|(centered, _)| centered)]
        {
            let found = dims(found);
            assert!(found.is_none() || found == Some(vec![rows, width]), "{rows}, {width}: {found:?}");
        }
    }
}

#[test]
fn elementwise_operations() {
    for shape in [[0, 3, 4], [2, 0, 4], [2, 3, 0]] {
        let x = zeros(&shape);
        for (name, found) in [
            ("softmax", softmax(&x, candle_core::D::Minus1)),
            ("add", add(&x, &x)),
            ("add_positions", add_positions(&x, &zeros(&[5, shape[2]]), 2)),
            ("dropout", dropout(&x, 0.5, &mut RandomStream::new(1))),
            ("gelu", Activation::GeluTanh.forward(&x)),
        ] {
            let found = dims(found);
            assert!(found.is_none() || found == Some(shape.to_vec()), "{name} of {shape:?}: {found:?}");
        }
    }
    assert!(head_loss(&zeros(&[1, 0, 4]), &zeros(&[5, 4]), &[]).is_err(), "no row");
    assert!(head_loss(&zeros(&[1, 1, 4]), &zeros(&[0, 4]), &[0]).is_err(), "no vocabulary");
    let _ = head_loss(&zeros(&[1, 1, 0]), &zeros(&[5, 0]), &[0]);
}

#[test]
fn attention() {
    for (batch, heads, queries, keys, width) in
        [(0, 3, 4, 5, 6), (2, 0, 4, 5, 6), (2, 3, 0, 5, 6), (2, 3, 4, 0, 6), (2, 3, 4, 5, 0)]
    {
        let (q, k) = (zeros(&[batch, queries, heads * width]), zeros(&[batch, keys, heads * width]));
        for dropout in [None, Some(Dropout { rate: 0.5, seed: 1 })] {
            let attention = || HeadsAttention {
                heads,
                scale: 0.5,
                visible: vec![0..keys; queries],
                added: None,
                dropout,
            };
            for found in [
                heads_attention(&[&q, &k, &k], attention()),
                composed(|| heads_attention(&[&q, &k, &k], attention())),
            ] {
                let found = dims(found);
                assert!(
                    found.is_none() || found == Some(q.dims().to_vec()),
                    "{batch} {heads} {queries} {keys} {width}: {found:?}"
                );
            }
        }
    }
}

#[test]
fn kv_memories() {
    for dtype in [KvDType::F32, KvDType::Q8, DType::BF16.into()] {
        for (heads, width, tokens) in [(0, 4, 16), (3, 0, 16), (3, 4, 0)] {
            let Ok(memory) = KvMemory::new(heads, width, tokens, dtype, &Device::Cpu) else { continue };
            let slots = KvSlot::side_by_side(1, tokens);
            let new = |tokens| zeros(&[1, heads, tokens, width]);
            for added in [0, tokens] {
                let _ = memory.write(&slots, [&new(added), &new(added)], &[0]);
                let _ = memory.attention(&new(added), &slots, 0.5, &vec![0..tokens; added]);
                let _ = memory.read(slots[0], 0..added);
                let _ = memory.copy(slots[0], &memory, slots[0], 0..added);
            }
            let _ = memory.side_by_side(&slots);
        }
        let memory = KvMemory::new(2, 3, 16, dtype, &Device::Cpu).unwrap();
        memory.write(&[], [&zeros(&[0, 2, 1, 3]), &zeros(&[0, 2, 1, 3])], &[]).unwrap();
        let projection = Linear::new(zeros(&[18, 4]), None).unwrap();
        let positions = |rows| Tensor::zeros((rows, 0), DType::U32, &Device::Cpu).unwrap();
        let _ = step_attention(&projection, &zeros(&[0, 1, 4]), &memory, &[], 0.5, &positions(0));
        let _ = step_attention(
            &projection,
            &zeros(&[1, 0, 4]),
            &memory,
            &KvSlot::side_by_side(1, 16),
            0.5,
            &positions(1),
        );
    }
}
