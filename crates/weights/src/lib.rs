#![doc = include_str!("../README.md")]
//!
//! Start with [`Checkpoint`].

#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod adapter;
mod bounded_file;
mod byte_pairs;
mod charsmap;
mod chat_template;
mod checkpoint;
mod checkpoint_file;
mod cleaning;
mod companions;
mod config_file;
mod control_vector;
mod convert;
mod crc32c;
mod devices;
mod error;
mod files;
mod formats;
mod ggml;
mod gguf_header;
mod gguf_keys;
mod gguf_tokenizer;
mod given_files;
mod grouped;
mod library;
mod library_encoder;
mod load;
mod lock;
mod lost_characters;
mod mapped_file;
mod mistaken_file;
mod model_proto;
mod named;
mod naming;
mod prefix_table;
mod progress;
mod readers;
mod replace;
mod rounding;
mod sentence_piece;
mod sentence_piece_file;
mod source;
mod statistics;
mod stored;
mod tensor_file;
mod text_encoder;
mod tied_head;
mod tokenizer;
mod tokenizer_limits;
mod vocabulary_file;
mod weight_dtype;
mod word_cache;
mod words;
mod write_gguf;
mod write_tensors;

pub use adapter::Adapter;
pub use bounded_file::{check_regular, open_regular, read_bounded, read_bounded_text, read_to_limit};
pub use checkpoint::{Checkpoint, OpenOptions, Problem};
pub use companions::Companions;
pub use control_vector::write_control_vector;
pub use convert::{replace_hugging_face, write_hugging_face, write_safetensors_file};
pub use error::{Mismatch, WeightsError};
pub use formats::is_checkpoint;
pub use given_files::{GivenFiles, ReadAt};
pub use grouped::grouped;
pub use load::{Head, LoadOptions};
pub use lock::{create_locked, expect_own_file, open_locked};
pub use lost_characters::{CharacterCheck, LostCharacter};
pub use mapped_file::MappedFile;
pub use named::UnknownName;
pub use naming::{Orientation, checkpoint_shape};
pub use progress::ReadProgress;
pub use readers::LoadMemory;
pub use replace::{create_file, create_folder, expect_free, partial_folder, partials, replace_file};
pub use source::Format;
pub use statistics::{Difference, DifferenceKind, Statistics, differences};
pub use stored::{StoredDType, StoredTensor};
pub use tensor_file::TensorFile;
pub use text_encoder::{EncoderSession, TextEncoder};
pub use tokenizer::{
    END_OF_TEXT, encode, encode_piece, encode_with_places, largest_foreign_token, load_tokenizer,
    ordinary_token, token_bytes, train_tokenizer,
};
pub use tokenizers::Tokenizer;
pub use weight_dtype::{WeightDType, WrittenDType};
pub use write_gguf::write_gguf;
pub use write_tensors::{tensor_bytes, write_npz, write_rounded_tensors, write_tensors};
