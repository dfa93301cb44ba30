//! The types of settings, and how their values are written. Used by the table when the environment is read.

use std::ffi::OsStr;
use std::ops::RangeInclusive;

/// A type that a setting can have.
pub(super) trait Value: Sized + PartialEq {
    /// The limits of the value.
    type Limits;
    /// `None` for text that is not such a value within the limits.
    fn parse(text: &str, limits: &Self::Limits) -> Option<Self>;
    /// The value of a variable as it stands in the environment.
    fn read(text: &OsStr, limits: &Self::Limits) -> Option<Self> {
        Self::parse(text.to_str()?.trim(), limits)
    }
    /// A value that is not accepted, as messages show it.
    fn show_rejected(text: &OsStr) -> String {
        text.to_string_lossy().into_owned()
    }
    /// The accepted values in words.
    fn accepted(limits: &Self::Limits) -> String;
    /// The value as one would write it.
    fn show(&self) -> String;
}

macro_rules! integer {
    ($type:ty) => {
        impl Value for $type {
            type Limits = RangeInclusive<$type>;

            fn parse(text: &str, limits: &Self::Limits) -> Option<Self> {
                // NCCL reads its numbers with strtoll(.., 0), so scripts may hold hexadecimal ones.
                let value = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
                    Some(digits) if !digits.starts_with('+') => <$type>::from_str_radix(digits, 16).ok()?,
                    _ => text.parse().ok()?,
                };
                limits.contains(&value).then_some(value)
            }

            fn accepted(limits: &Self::Limits) -> String {
                format!("{}..{}", limits.start(), limits.end())
            }

            fn show(&self) -> String {
                self.to_string()
            }
        }
    };
}

integer!(u32);
integer!(i32);

impl Value for bool {
    type Limits = ();

    fn parse(text: &str, (): &()) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "1" | "true" | "yes" | "on" => Some(true),
            "0" | "false" | "no" | "off" => Some(false),
            _ => None,
        }
    }

    fn accepted((): &()) -> String {
        "0, 1".into()
    }

    fn show(&self) -> String {
        u8::from(*self).to_string()
    }
}

/// Text that passes a check.
pub(super) struct Text {
    pub(super) accepted: &'static str,
    pub(super) check: fn(&str) -> bool,
}

impl Value for String {
    type Limits = Text;

    fn parse(text: &str, limits: &Text) -> Option<Self> {
        (limits.check)(text).then(|| text.to_string())
    }

    fn accepted(limits: &Text) -> String {
        limits.accepted.into()
    }

    fn show(&self) -> String {
        self.clone()
    }
}

/// Enums whose values have names, compared without regard to case.
macro_rules! choice {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name { $($(#[$doc])* $variant,)* }

        impl Value for $name {
            type Limits = ();

            fn parse(text: &str, (): &()) -> Option<Self> {
                $(if text.eq_ignore_ascii_case($text) { return Some($name::$variant); })*
                None
            }

            fn accepted((): &()) -> String {
                [$($text),*].join(", ")
            }

            fn show(&self) -> String {
                match self { $($name::$variant => $text.into(),)* }
            }
        }
    };
}

pub(super) use choice;
