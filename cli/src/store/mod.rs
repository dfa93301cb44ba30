//! `railhead store`: serves a key-value store that ranks find each other through, and looks into one, torch's or Railhead's. On the main thread; a
//! watch calls from its own.

mod list;
mod serve;
mod target;
mod watch;

use std::io::{Read, Write};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Subcommand;
use railhead::store::Error;
use target::StoreTarget;

/// Serves a key-value store for ranks to find each other through, or looks into one.
///
/// The protocol is PyTorch's TCPStore: torch's programs can use the server, and the other commands work on torch's servers (but for watch). The
/// secret of RAILHEAD_STORE_SECRET keeps out who does not know it, torch's programs among them.
///
/// A value of `-` is read from standard input, which nothing else reads.
///
/// Exit status: 0 done, 1 what was waited for did not come in time, a key to delete or a value to pop was not there, or cas stored nothing, 2 anything else.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Serve(serve::Args),
    /// Prints a key's value, waiting for it
    Get {
        #[command(flatten)]
        target: StoreTarget,
        /// The key
        key: String,
        /// The bytes as they are, without a newline behind them
        #[arg(long)]
        raw: bool,
    },
    /// Stores a value
    Set(Change),
    /// Appends to a value, which starts empty
    Append(Change),
    /// Adds to a number and prints the sum
    Add {
        #[command(flatten)]
        target: StoreTarget,
        /// The key, whose value is 0 if there is none
        key: String,
        /// What to add
        #[arg(default_value_t = 1, allow_negative_numbers = true)]
        number: i64,
    },
    /// Stores a value if the present one is as expected, and prints the value after that
    Cas {
        #[command(flatten)]
        target: StoreTarget,
        /// The key
        key: String,
        /// The value that it has to have; empty: that, or none. It is printed, too, if there is no value
        #[arg(allow_negative_numbers = true)]
        expected: String,
        /// The value to store
        #[arg(allow_negative_numbers = true)]
        desired: String,
        /// The bytes as they are, without a newline behind them
        #[arg(long)]
        raw: bool,
    },
    /// Deletes keys
    Delete(Keys),
    /// Waits until all keys exist
    Wait(Keys),
    /// Appends a value to a queue
    Push(Change),
    /// Takes the oldest value from a queue and prints it, waiting for one
    Pop {
        #[command(flatten)]
        target: StoreTarget,
        /// The queue's key
        key: String,
        /// The bytes as they are, without a newline behind them
        #[arg(long)]
        raw: bool,
    },
    /// Prints how many values a queue holds
    Len {
        #[command(flatten)]
        target: StoreTarget,
        /// The queue's key
        key: String,
    },
    /// Prints how many keys there are, those of the store's own bookkeeping included, and queues not
    Count {
        #[command(flatten)]
        target: StoreTarget,
    },
    Ls(list::Args),
    Watch(watch::Args),
}

/// A key and what is to become of it.
#[derive(clap::Args)]
struct Change {
    #[command(flatten)]
    target: StoreTarget,
    /// The key
    key: String,
    /// The value, or `-` for what comes on standard input
    #[arg(allow_negative_numbers = true)]
    value: String,
}

/// Several keys.
#[derive(clap::Args)]
struct Keys {
    #[command(flatten)]
    target: StoreTarget,
    /// The keys
    #[arg(required = true)]
    keys: Vec<String>,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match carry_out(&args.command) {
        Ok(true) => Ok(ExitCode::SUCCESS),
        Ok(false) => Ok(ExitCode::FAILURE),
        Err(error) if matches!(error.downcast_ref(), Some(Error::Timeout(_) | Error::QueueEmpty)) => {
            crate::say(format_args!("railhead: {error:#}"));
            Ok(ExitCode::FAILURE)
        }
        Err(error) => Err(error),
    }
}

/// Whether what was asked for could be done.
fn carry_out(command: &Command) -> anyhow::Result<bool> {
    match command {
        Command::Serve(args) => serve::run(args)?,
        Command::Get { target, key, raw } => {
            let (store, left) = target.open()?;
            print_value(store.get(key, left)?, *raw)?;
        }
        Command::Set(Change { target, key, value }) => {
            let value = given(value)?;
            let (store, _) = target.open()?;
            store.set(key, &value)?;
            // A set is not answered; what is answered after it comes after it.
            if !store.check(&[key])? {
                bail!("{key} was deleted at once");
            }
        }
        Command::Append(Change { target, key, value }) => {
            let value = given(value)?;
            let (store, _) = target.open()?;
            store.append(key, &value)?;
            store.check(&[key])?;
        }
        Command::Add { target, key, number } => print_number(target.open()?.0.add(key, *number)?)?,
        Command::Cas { target, key, expected, desired, raw } => {
            if expected == "-" && desired == "-" {
                bail!("only one of EXPECTED and DESIRED can be standard input");
            }
            let (expected, desired) = (given(expected)?, given(desired)?);
            let (store, _) = target.open()?;
            let value = store.compare_set(key, &expected, &desired)?;
            // A key that does not exist gives back what was expected.
            let stored = value == desired && (expected != desired || store.check(&[key])?);
            print_value(value, *raw)?;
            return Ok(stored);
        }
        Command::Delete(Keys { target, keys }) => {
            let (store, _) = target.open()?;
            // A store in a file does not say whether the key was there.
            return keys.iter().try_fold(true, |all, key| Ok(store.check(&[key])? && store.delete_key(key)? && all));
        }
        Command::Wait(Keys { target, keys }) => {
            let (store, left) = target.open()?;
            store.wait(&keys.iter().map(String::as_str).collect::<Vec<_>>(), left)?;
        }
        Command::Push(Change { target, key, value }) => {
            let value = given(value)?;
            let (store, _) = target.open()?;
            store.queue_push(key, &value)?;
            store.queue_len(key)?;
        }
        Command::Pop { target, key, raw } => {
            let (store, left) = target.open()?;
            print_value(store.queue_pop(key, left)?, *raw)?;
        }
        Command::Len { target, key } => print_number(target.open()?.0.queue_len(key)?)?,
        Command::Count { target } => print_number(target.open()?.0.num_keys()?)?,
        Command::Ls(args) => list::run(args)?,
        Command::Watch(args) => watch::run(args)?,
    }
    Ok(true)
}

/// A value of the command line, or of standard input.
fn given(value: &str) -> anyhow::Result<Vec<u8>> {
    if value != "-" {
        return Ok(value.as_bytes().to_vec());
    }
    let mut value = Vec::new();
    std::io::stdin().read_to_end(&mut value).context("reading standard input")?;
    Ok(value)
}

fn print_value(mut value: Vec<u8>, raw: bool) -> anyhow::Result<()> {
    if !raw {
        value.push(b'\n');
    }
    print(&value)
}

fn print_number(number: i64) -> anyhow::Result<()> {
    print(format!("{number}\n").as_bytes())
}

/// Text without anything that a terminal acts upon.
fn shown(text: &str) -> String {
    let shown = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(shown).collect()
}

fn print(bytes: &[u8]) -> anyhow::Result<()> {
    print_on(bytes).map(drop)
}

/// Whether anybody reads on: whoever does not has seen enough.
fn print_on(bytes: &[u8]) -> anyhow::Result<bool> {
    let mut out = std::io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        result => result.map(|()| true).context("writing to stdout"),
    }
}
