//! Detection of a separate output head in a file whose configuration ties the head to the embedding.
//!
//! transformers leaves such a head untied. The intended model is ambiguous, so the user must decide. A copy
//! of the embedding under the head's name does not count as a separate head.

use crate::checkpoint_file::CheckpointFile;
use crate::naming::{Naming, Origin};
use crate::progress::{PIECE, check_interrupted};
use crate::source::Source;
use crate::stored::StoredTensor;
use crate::{Mismatch, ReadProgress, WeightsError};

/// Returns the head that contradicts the configuration, if there is one.
pub(crate) fn contradiction(
    source: &Source,
    naming: &Naming,
    progress: &dyn ReadProgress,
) -> Result<Option<Mismatch>, WeightsError> {
    let embedding = naming.parameters.get("wte.weight");
    let (Some(head), Some((Origin::Whole(embedding), parameter))) = (naming.tied_head, embedding) else {
        return Ok(None);
    };
    let (head, embedding) = (&source.tensors[head], &source.tensors[*embedding]);
    let comparable = |tensor: &StoredTensor| tensor.dtype.holds_weights() && tensor.shape == parameter.shape;
    if !comparable(head) || !comparable(embedding) || is_copy(head, embedding, &source.files, progress)? {
        return Ok(None);
    }
    let differing = differing(head, embedding, &source.files, PIECE, progress)?;
    let (name, embedding, elements) = (head.name.clone(), embedding.name.clone(), head.element_count());
    Ok((differing > 0).then_some(Mismatch::TieContradiction { name, embedding, differing, elements }))
}

/// Whether both tensors have the same dtype and identical bytes.
fn is_copy(
    head: &StoredTensor,
    embedding: &StoredTensor,
    files: &[CheckpointFile],
    progress: &dyn ReadProgress,
) -> Result<bool, WeightsError> {
    const PIECE_BYTES: u64 = (PIECE * size_of::<f32>()) as u64;
    if head.dtype != embedding.dtype || head.strides != embedding.strides {
        return Ok(false);
    }
    if head.file == embedding.file && head.bytes == embedding.bytes {
        return Ok(true);
    }
    let count = head.stored_bytes();
    if count != embedding.stored_bytes() {
        return Ok(false);
    }
    let mut start = 0;
    let mut is_equal = true;
    while is_equal && start < count {
        check_interrupted(progress)?;
        let end = count.min(start + PIECE_BYTES);
        let [head, embedding] = [head, embedding].map(|tensor| tensor.part(start..end));
        is_equal = head.stored(files)? == embedding.stored(files)?;
        for part in [head, embedding] {
            part.forget(files, part.bytes.clone());
        }
        start = end;
    }
    Ok(is_equal)
}

/// Counts the values that differ between two tensors of equal shape.
///
/// About `piece` elements of each tensor are in memory at a time. NaN differs from everything, including NaN.
fn differing(
    head: &StoredTensor,
    embedding: &StoredTensor,
    files: &[CheckpointFile],
    piece: usize,
    progress: &dyn ReadProgress,
) -> Result<usize, WeightsError> {
    let row = head.shape.iter().skip(1).product::<usize>().max(1);
    let rows = head.shape.first().copied().unwrap_or(1);
    let mut differing = 0;
    let mut start = 0;
    while start < rows {
        check_interrupted(progress)?;
        let wanted = start..rows.min(start + (piece / row).max(1));
        let (head, embedding, end) = match (head.rows(wanted.clone()), embedding.rows(wanted.clone())) {
            (Some(head), Some(embedding)) => (head, embedding, wanted.end),
            // One of the tensors cannot be split at these rows.
            _ => (head.clone(), embedding.clone(), rows),
        };
        let (head, embedding) = (head.values(files)?, embedding.values(files)?);
        differing += head.iter().zip(&embedding).filter(|(head, embedding)| head != embedding).count();
        start = end;
    }
    Ok(differing)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use candle_gpt2_arithmetic::NumberType;
    use half::f16;

    use super::*;
    use crate::given_files::Contents;
    use crate::stored::StoredDType;

    const SHAPE: [usize; 2] = [5, 3];

    fn tensor(file: usize, dtype: NumberType, bytes: u64) -> StoredTensor {
        StoredTensor {
            name: file.to_string(),
            shape: SHAPE.into(),
            dtype: StoredDType::Weights(dtype),
            file,
            bytes: 0..bytes,
            strides: None,
            checksum: None,
        }
    }

    /// Creates two files with the same values in f32 and in f16; `changes` apply to the f16 file.
    ///
    /// f16 represents the unchanged values exactly.
    fn files(changes: &[(usize, f32)]) -> [CheckpointFile; 2] {
        let mut values: Vec<f32> = (0u8..15).map(|value| f32::from(value) - 7.0).collect();
        let embedding: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        for (index, value) in changes {
            values[*index] = *value;
        }
        let head: Vec<u8> = values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect();
        [("embedding", embedding), ("head", head)].map(|(name, bytes)| {
            CheckpointFile::given(name.as_ref(), Contents::Bytes(Arc::new(bytes.into())))
        })
    }

    #[test]
    fn difference_count_does_not_depend_on_chunk_size() {
        for (changes, expected) in [
            (&[][..], 0),
            // 0 and -0 are the same value.
            (&[(7, -0.0)], 0),
            (&[(14, 1.5)], 1),
            (&[(0, 1.5), (5, f32::NAN), (6, 9.0), (14, f32::INFINITY)], 4),
        ] {
            let files = files(changes);
            let (head, embedding) = (tensor(1, NumberType::F16, 30), tensor(0, NumberType::F32, 60));
            for piece in [1, 3, 7, 9, 15, 1000] {
                let found = differing(&head, &embedding, &files, piece, &|_| ()).unwrap();
                assert_eq!(found, expected, "{changes:?} in pieces of {piece}");
            }
        }
    }

    /// Checks a transposed tensor, which cannot be split into rows and is compared as a whole.
    #[test]
    fn transposed_tensors_are_compared() {
        let files = files(&[]);
        let embedding = tensor(0, NumberType::F32, 60);
        let transposed = StoredTensor { shape: vec![3, 5], strides: Some(vec![1, 3]), ..embedding.clone() };
        let contiguous = StoredTensor { shape: vec![3, 5], ..embedding.clone() };
        // At (i, j), one tensor has the element i + 3 j, the other 5 i + j. They coincide at three
        // positions.
        assert_eq!(differing(&transposed, &contiguous, &files, 5, &|_| ()).unwrap(), 12);
        let is_copy = |first, second| is_copy(first, second, &files, &|_| ()).unwrap();
        assert!(is_copy(&transposed, &transposed) && !is_copy(&transposed, &contiguous));
    }
}
