/* Reads the caller's own Railhead stats page, if the loaded plugin keeps one: by which path did bytes leave and arrive? */
#ifndef C_EXAMPLES_RAILHEAD_STATS_H
#define C_EXAMPLES_RAILHEAD_STATS_H

/*
 * Prints one line: "# rank 0: bytes sent: cross-memory 123, inline 4; received: ...", summed over all rails of the comms that are open.
 * Nothing if there is no page of a known version.
 */
void railhead_print_paths(int rank);

#endif
