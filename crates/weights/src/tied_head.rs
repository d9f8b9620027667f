//! A head of its own in a file whose configuration ties the head to the embedding. transformers leaves such a head untied; which
//! of the two is meant cannot be told, so the user must say. A copy of the embedding under the head's name is no such head.

use crate::checkpoint_file::CheckpointFile;
use crate::naming::{Naming, Origin};
use crate::progress::{PIECE, check_interrupted};
use crate::source::Source;
use crate::stored::StoredTensor;
use crate::{Mismatch, ReadProgress, WeightsError};

/// The head that contradicts the configuration, if there is one.
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

/// Whether the same bytes stand for the same values in both.
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

/// How many values differ, of tensors of one shape; about `piece` elements of each are held at a time. What is not a number
/// differs from everything, itself included.
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
            // One of them cannot be cut there.
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

    use half::f16;

    use super::*;
    use crate::given_files::Contents;
    use crate::stored::StoredDType;

    const SHAPE: [usize; 2] = [5, 3];

    fn tensor(file: usize, dtype: StoredDType, bytes: u64) -> StoredTensor {
        StoredTensor {
            name: file.to_string(),
            shape: SHAPE.into(),
            dtype,
            file,
            bytes: 0..bytes,
            strides: None,
            checksum: None,
        }
    }

    /// Values that f16 holds exactly, in f32, and in f16 with changes.
    fn files(changes: &[(usize, f32)]) -> [CheckpointFile; 2] {
        let mut values: Vec<f32> = (0u8..15).map(|value| f32::from(value) - 7.0).collect();
        let embedding: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        for (place, value) in changes {
            values[*place] = *value;
        }
        let head: Vec<u8> = values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect();
        [("embedding", embedding), ("head", head)].map(|(name, bytes)| {
            CheckpointFile::given(name.as_ref(), Contents::Bytes(Arc::new(bytes.into())))
        })
    }

    #[test]
    fn pieces_of_any_size_find_every_difference() {
        for (changes, expected) in [
            (&[][..], 0),
            // The value 0 with another sign is the same value.
            (&[(7, -0.0)], 0),
            (&[(14, 1.5)], 1),
            (&[(0, 1.5), (5, f32::NAN), (6, 9.0), (14, f32::INFINITY)], 4),
        ] {
            let files = files(changes);
            let (head, embedding) = (tensor(1, StoredDType::F16, 30), tensor(0, StoredDType::F32, 60));
            for piece in [1, 3, 7, 9, 15, 1000] {
                let found = differing(&head, &embedding, &files, piece, &|_| ()).unwrap();
                assert_eq!(found, expected, "{changes:?} in pieces of {piece}");
            }
        }
    }

    /// A tensor in another order cannot be cut into rows, and is compared as a whole.
    #[test]
    fn a_turned_tensor_is_compared_too() {
        let files = files(&[]);
        let embedding = tensor(0, StoredDType::F32, 60);
        let turned = StoredTensor { shape: vec![3, 5], strides: Some(vec![1, 3]), ..embedding.clone() };
        let straight = StoredTensor { shape: vec![3, 5], ..embedding.clone() };
        // Of (i, j) one has the value at i + 3 j and the other that at 5 i + j: the same for three of the places.
        assert_eq!(differing(&turned, &straight, &files, 5, &|_| ()).unwrap(), 12);
        let is_copy = |first, second| is_copy(first, second, &files, &|_| ()).unwrap();
        assert!(is_copy(&turned, &turned) && !is_copy(&turned, &straight));
    }
}
