//! `railhead store ls`: the keys, in order, and their values if they are asked for.

use std::time::Duration;

use railhead::store::{Error, Store};
use serde_json::{Map, Value, json};

/// Lists the keys, a line each
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    target: super::StoreTarget,
    /// Their values, too, behind a tab; what is no text in either is escaped
    #[arg(long)]
    values: bool,
    /// As a JSON array: of the keys, or with --values of objects with `key` and `value`, or `bytes` if the value is no UTF-8
    #[arg(long)]
    json: bool,
}

/// How long to wait for a key that was there: it is deleted if it does not come.
const MOMENT: Duration = Duration::from_secs(1);

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let (store, _) = args.target.open()?;
    let mut keys = store.list_keys()?;
    keys.sort();
    let mut entries = Vec::new();
    for key in keys {
        if !args.values {
            entries.push((key, None));
        } else if let Some(value) = value(&*store, &key)? {
            entries.push((key, Some(value)));
        }
    }
    let text = match args.json {
        true => Value::from_iter(entries.into_iter().map(|(key, value)| object(key, value))).to_string() + "\n",
        false => entries.into_iter().map(|(key, value)| line(&key, value.as_deref())).collect(),
    };
    super::print(text.as_bytes())
}

fn value(store: &dyn Store, key: &str) -> Result<Option<Vec<u8>>, Error> {
    match store.get(key, MOMENT) {
        Err(Error::Timeout(_)) if !store.check(&[key])? => Ok(None),
        value => value.map(Some),
    }
}

/// A key or a value may hold anything; one line each, and no terminal is written to behind the user's back.
fn line(key: &str, value: Option<&[u8]>) -> String {
    let value = value.map(|value| format!("\t{}", super::shown(&String::from_utf8_lossy(value))));
    format!("{}{}\n", super::shown(key), value.unwrap_or_default())
}

fn object(key: String, value: Option<Vec<u8>>) -> Value {
    let Some(value) = value else { return key.into() };
    let (name, value) = match String::from_utf8(value) {
        Ok(text) => ("value", json!(text)),
        Err(e) => ("bytes", json!(e.into_bytes())),
    };
    Value::Object(Map::from_iter([("key".to_owned(), key.into()), (name.to_owned(), value)]))
}
