//! `top` in a terminal. Whatever ends it (a key, a signal, an error, a panic) leaves the terminal as it was.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Alignment, Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Paragraph, Row as TableRow, Table, TableState};
use ratatui::{DefaultTerminal, Frame as Canvas};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP};

use super::rates::{Frame, Key, Order, Row};
use super::view::{COLUMNS, RIGHT, cells, details, peer, summary};
use super::{Args, Source};
use railhead::base::stats::WaitCause;

/// Longest time until a signal is noticed.
const POLL_TIMEOUT: Duration = Duration::from_millis(50);
/// From this age on, a wait is worth a colour.
const LONG_WAIT_NS: u64 = 1_000_000_000;

/// The terminal in our hands; given back when dropped.
struct Screen {
    terminal: DefaultTerminal,
}

impl Screen {
    fn take() -> anyhow::Result<Screen> {
        // Also has panics give it back before they are printed.
        let terminal = ratatui::try_init().inspect_err(|_| ratatui::restore()).context("preparing the terminal")?;
        Ok(Screen { terminal })
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// The last signal that came.
struct Signals {
    last: Arc<AtomicUsize>,
}

impl Signals {
    fn watch() -> anyhow::Result<Signals> {
        let last = Arc::new(AtomicUsize::new(0));
        for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGCONT] {
            signal_hook::flag::register_usize(signal, last.clone(), signal as usize).context("watching signals")?;
        }
        Ok(Signals { last })
    }

    fn take(&self) -> i32 {
        self.last.swap(0, Ordering::Relaxed) as i32
    }
}

/// What a key or a signal asks for.
enum Next {
    Go,
    Draw,
    Pause,
    End(ExitCode),
}

struct App {
    frame: Frame,
    order: Order,
    /// The chosen comm; the row in its place if it is gone.
    chosen: Option<Key>,
    state: TableState,
    colours: bool,
}

/// Runs until q or a signal.
pub fn run(mut source: Source, args: &Args) -> anyhow::Result<ExitCode> {
    let term = std::env::var("TERM").unwrap_or_default();
    let colours = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()) && has_colours(&term);
    let mut app = App { frame: source.look()?, order: args.sort, chosen: None, state: TableState::default(), colours };
    let signals = Signals::watch()?;
    let mut screen = Screen::take()?;
    let mut looked = Instant::now();
    app.frame.sort(app.order);
    loop {
        screen.terminal.draw(|canvas| app.draw(canvas)).context("drawing")?;
        loop {
            let left = args.interval.saturating_sub(looked.elapsed());
            match app.next(&signals, left.min(POLL_TIMEOUT))? {
                Next::Draw => break,
                Next::End(code) => return Ok(code),
                Next::Pause => {
                    drop(screen);
                    signal_hook::low_level::emulate_default_handler(SIGTSTP).context("stopping")?;
                    screen = Screen::take()?;
                    break;
                }
                Next::Go if left.is_zero() => {
                    looked = Instant::now();
                    app.frame = source.look()?;
                    app.frame.sort(app.order);
                    break;
                }
                Next::Go => {}
            }
        }
    }
}

/// Whether a terminal of that name shows colours: those of the VT100 and VT200 families and the monochrome ones do not.
fn has_colours(term: &str) -> bool {
    let family = |name: &str| term.strip_prefix(name).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    !(family("vt1") || family("vt2") || term.ends_with("-m") || term == "dumb")
}

/// Waits for input, at most that long; false if the terminal has hung up, which, asked for input, has none for ever.
fn wait_for_input(timeout: Duration) -> anyhow::Result<bool> {
    let stdin = std::io::stdin();
    let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
    match poll(&mut fds, Some(&timeout.try_into()?)) {
        // A signal, which is looked at next.
        Ok(_) | Err(Errno::INTR) => Ok(!fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL)),
        Err(error) => Err(error).context("waiting for a key"),
    }
}

impl App {
    /// Waits for a key or a signal, at most that long.
    fn next(&mut self, signals: &Signals, timeout: Duration) -> anyhow::Result<Next> {
        // Before the key: what was typed must not get lost over a signal.
        match signals.take() {
            0 => {}
            SIGTSTP => return Ok(Next::Pause),
            SIGCONT => return Ok(Next::Draw),
            signal => return Ok(Next::End(ExitCode::from(128 + signal as u8))),
        }
        if !wait_for_input(timeout)? {
            return Ok(Next::End(ExitCode::from(128 + SIGHUP as u8)));
        }
        let now = Duration::ZERO;
        let event = if event::poll(now).context("waiting for a key")? { Some(event::read().context("reading a key")?) } else { None };
        let key = match event {
            None => return Ok(Next::Go),
            Some(Event::Key(key)) if key.kind != KeyEventKind::Release => key,
            Some(_) => return Ok(Next::Draw),
        };
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if control => return Ok(Next::End(ExitCode::from(130))),
            KeyCode::Char('z') if control => return Ok(Next::Pause),
            KeyCode::Char('q') | KeyCode::Esc => return Ok(Next::End(ExitCode::SUCCESS)),
            KeyCode::Char('s') => {
                self.order = self.order.next();
                self.frame.sort(self.order);
            }
            KeyCode::Up | KeyCode::Char('k') => self.choose(-1),
            KeyCode::Down | KeyCode::Char('j') => self.choose(1),
            KeyCode::PageUp => self.choose(-10),
            KeyCode::PageDown => self.choose(10),
            _ => {}
        }
        Ok(Next::Draw)
    }

    fn place(&self) -> usize {
        let there = self.frame.rows.iter().position(|row| Some(row.key) == self.chosen);
        there.unwrap_or_else(|| self.state.selected().unwrap_or(0).min(self.frame.rows.len().saturating_sub(1)))
    }

    fn choose(&mut self, by: isize) {
        let last = self.frame.rows.len().saturating_sub(1);
        let place = self.place().saturating_add_signed(by).min(last);
        self.chosen = self.frame.rows.get(place).map(|row| row.key);
    }

    fn draw(&mut self, canvas: &mut Canvas) {
        let [head, help, body, foot] =
            Layout::vertical([Constraint::Length(1), Constraint::Length(1), Constraint::Fill(1), Constraint::Length(2)])
                .areas(canvas.area());
        canvas.render_widget(Line::from(summary(&self.frame)).style(Style::new().add_modifier(Modifier::BOLD)), head);
        canvas.render_widget(Line::from(format!("by {} (s changes), q quits", self.order.name())), help);
        if self.frame.rows.is_empty() {
            canvas.render_widget(Paragraph::new("no process of this user has a comm of Railhead"), body);
            return;
        }
        let wide = canvas.area().width > 100;
        let peer = wide.then_some(("PEER", Constraint::Fill(1)));
        let widths = COLUMNS.iter().map(|(_, width)| Constraint::Length(*width)).chain(peer.map(|(_, width)| width));
        let heading = |(name, right): (&'static str, bool)| cell(name.to_owned(), right);
        let header = COLUMNS.iter().map(|(name, _)| *name).zip(RIGHT).chain(peer.map(|(name, _)| (name, false))).map(heading);
        let rows: Vec<TableRow> = self.frame.rows.iter().map(|row| self.row(row, wide)).collect();
        let place = self.place();
        self.state.select(Some(place));
        let table = Table::new(rows, widths)
            .header(TableRow::new(header).style(Style::new().add_modifier(Modifier::UNDERLINED)))
            .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
        canvas.render_stateful_widget(table, body, &mut self.state);
        if let Some(row) = self.frame.rows.get(place) {
            canvas.render_widget(Text::from_iter(details(row)), foot);
        }
    }

    fn row(&self, row: &Row, wide: bool) -> TableRow<'static> {
        let cells = cells(row).into_iter().zip(RIGHT).map(|(text, right)| cell(text, right));
        let cells = cells.chain(wide.then(|| Cell::from(peer(row))));
        TableRow::new(cells).style(self.colour(row))
    }

    fn colour(&self, row: &Row) -> Style {
        match row.wait {
            _ if !self.colours => Style::new(),
            WaitCause::PeerStopped | WaitCause::PeerGone => Style::new().fg(Color::Red),
            WaitCause::None => Style::new(),
            _ if row.wait_age_ns >= LONG_WAIT_NS => Style::new().fg(Color::Yellow),
            _ => Style::new(),
        }
    }
}

fn cell(text: String, right: bool) -> Cell<'static> {
    let alignment = if right { Alignment::Right } else { Alignment::Left };
    Cell::from(Text::from(text).alignment(alignment))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminals_without_colours_get_none() {
        for (term, colours) in [
            ("vt100", false),
            ("vt220", false),
            ("xterm-m", false),
            ("dumb", false),
            ("xterm-256color", true),
            ("vt340", true),
            ("tmux", true),
        ] {
            assert_eq!(has_colours(term), colours, "{term}");
        }
    }
}
