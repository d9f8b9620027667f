#![doc = include_str!("../README.md")]

mod page;
mod parts;

pub use page::{PageFile, files};
pub use parts::{
    HEAD_HTML, LEARNED_CSS, LEARNED_HTML, LEARNED_JS, LEARNED_PAGE_JS, PARTS_CSS, PARTS_JS, REPORT_HTML,
    REPORT_PAGE_CSS, REPORT_PAGE_HTML, REPORT_PAGE_JS, WRITING_CSS, WRITING_JS,
};
