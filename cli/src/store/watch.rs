//! `railhead store watch`: a line per change, as it happens.

use std::sync::mpsc;

use railhead::store::Change;

/// Prints each change of the keys, until the server is gone; Railhead's servers only
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    target: super::StoreTarget,
    /// The keys
    #[arg(required = true)]
    keys: Vec<String>,
    /// Ends after so many changes
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let (store, _) = args.target.open()?;
    let (send, lines) = mpsc::sync_channel(64);
    let mut watches = Vec::new();
    for key in &args.keys {
        let (name, send) = (key.clone(), send.clone());
        let tell = move |change: Change<'_>| {
            // Nobody listens once the count is reached.
            let _ = send.send(line(&name, &change));
        };
        watches.push(store.watch_key(key, Box::new(tell))?);
    }
    crate::say(format_args!("watching"));
    let mut left = args.count;
    while left != Some(0) {
        match lines.recv()? {
            Ok(line) if super::print_on(line.as_bytes())? => {}
            Ok(_) => break,
            Err(words) => anyhow::bail!("{words}"),
        }
        left = left.map(|left| left - 1);
    }
    // A callback that waits for room would keep its watch from ending.
    drop(lines);
    Ok(())
}

fn line(key: &str, change: &Change<'_>) -> Result<String, String> {
    let text = |value: &[u8]| super::shown(&String::from_utf8_lossy(value));
    match change {
        Change::Created(new) => Ok(format!("{key} created {}\n", text(new))),
        Change::Updated(_, new) => Ok(format!("{key} updated {}\n", text(new))),
        Change::Deleted(_) => Ok(format!("{key} deleted\n")),
        Change::Lost(error) => Err(error.to_string()),
    }
}
