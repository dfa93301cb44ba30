//! Whole numbers on the command line, refused with the range. Used by the commands' arguments.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// A parser for clap of a number in a range.
pub fn within<T>(range: RangeInclusive<T>) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static
where
    T: FromStr + PartialOrd + Display + Clone + Send + Sync + 'static,
{
    move |text| match text.parse() {
        Ok(number) if range.contains(&number) => Ok(number),
        _ => Err(format!("expected a whole number from {} to {}", range.start(), range.end())),
    }
}

/// Of a process: as high as Linux lets them be.
pub const PIDS: RangeInclusive<i32> = 1..=4_194_304;
/// Versions of NCCL's table.
pub const ABIS: RangeInclusive<u32> = 4..=12;
