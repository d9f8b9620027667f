#![doc = include_str!("../README.md")]

mod page;
mod parts;

pub use page::{PageFile, files};
pub use parts::{
    HEAD_HTML, PARTS_CSS, PARTS_JS, REPORT_HTML, REPORT_PAGE_CSS, REPORT_PAGE_HTML, REPORT_PAGE_JS,
    WRITING_CSS, WRITING_JS,
};
