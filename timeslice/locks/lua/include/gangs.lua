-- Gangs: the ranks of one program, which wait and hold as one. Needs group, waiters.
-- Waiters hash: `<gang>/party/<rank>` -> "id host pid start renewed", where renewed is when that rank last renewed
-- itself ('-': not yet, 'left': it gave the lease up); `<id>/gang` -> "gang rank"; `@<name>` -> the round that forms.
-- Alive: `<gang>/<rank>` -> that rank's own deadline. Who passes it ends the gang.
local WORLD_MAX = 1024 -- ranks: what one call can look through without keeping all others waiting
local NAMED_MAX = 8
local UNKNOWN = '?' -- stands for who a rank is, after data loss

local function party_get(gang, rank)
  local text = redis.call('HGET', waiters_key, gang .. '/party/' .. rank)
  local id, host, pid, start, renewed = string.match(text or '', '^(%S+) (%S+) (%S+) (%S+) (%S+)$')
  return id and { id = id, host = host, pid = pid, start = start, renewed = renewed }
end
