//! Data entries from the rows of a Parquet file.

use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;
use parquet::errors::ParquetError;
use parquet::file::serialized_reader::SerializedFileReader;
use parquet::record::reader::RowIter;
use serde_json::{Map, Value};

use super::record::Row;

/// Iterates over the rows, numbered from 1.
pub(super) fn rows(bytes: &[u8]) -> Box<dyn Iterator<Item = Row> + '_> {
    // The Parquet reader needs to own its bytes.
    let bytes = Bytes::copy_from_slice(bytes);
    let opened = without_panic(|| {
        let reader = SerializedFileReader::new(bytes)?;
        Ok(RowIter::from_file_into(Box::new(reader)))
    });
    let mut rows = match opened {
        Ok(rows) => rows,
        Err(what) => return Box::new(std::iter::once((1, Err(what)))),
    };
    let mut next = move || without_panic(|| rows.next().map(|row| fields(row?.to_json_value())).transpose());
    Box::new((1..).map_while(move |line| next().transpose().map(|row| (line, row))))
}

fn fields(row: Value) -> Result<Map<String, Value>, ParquetError> {
    match row {
        Value::Object(fields) => Ok(fields),
        _ => Err(ParquetError::General("the row has no fields".to_owned())),
    }
}

/// Converts a panic into an error, because the Parquet reader panics on some damaged files.
fn without_panic<T>(work: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    let damaged = |_| Err("the file is damaged in a way that the Parquet reader cannot handle".to_owned());
    catch_unwind(AssertUnwindSafe(work))
        .map_or_else(damaged, |result| result.map_err(|error| error.to_string()))
}
