--[[
The group's state: loading, clock, counter, saving. Every script of a group starts with begin().
KEYS  1 state  2 queue  3 waiters  4 alive  5 grant prefix  6 ended  7 jobs  8 members  9 nodes
      10 inbox  11 events  12 config  13 targets
ARGV  1 floor: the highest number the caller knows of this group (0 if none)
--]]
local state_key, queue_key, waiters_key, alive_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local grant_prefix, ended_key, jobs_key, members_key = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local nodes_key, inbox_key, events_key, config_key, targets_key = KEYS[9], KEYS[10], KEYS[11], KEYS[12], KEYS[13]

local WAITER_TTL_MS = 15000
local LEASE_MS = 30000
local NODE_TTL_MS = 15000
local OWNER_MS = 10000
local CLOCK_JUMP_MS = 10000 -- two refresh intervals of a waiter
local SERVER_CHANGE_MS = 20 -- no server is started or promoted in less
local MAX_PAUSE_MS = 120000 -- no deferral or quiet time is longer
local ENDED_KEEP_MS = 120000
local GRANT_KEEP_S = 120
local UNDECLARED_KEEP_S = 600
local AHEAD_MS = 366 * 86400000 -- of the clock, which may have been wrong when a number was drawn
local FIELD_MAX, RECORD_MAX, BODY_MAX = 256, 8192, 262144 -- bytes of a field or name, of a text or record, of a plan
local TARGETS_MAX = 10000 -- registrations
local WAITERS_MAX = 10000 -- that are alive, each rank of a gang counted
local WORLD_MAX = 1024 -- ranks of a gang: what a call can look through without keeping everybody waiting
local LOSS_NOTED = 1 -- as a birth: older numbers prove nothing new
local EVENTS_KEPT, INBOX_KEPT, ENDED_KEPT = 2000, 64, 10000

local S = {} -- the state as read, then as changed
local changes = {} -- what save() writes
local now = 0
local floor = 0

-- Large numbers lose digits by tostring(); this keeps all of them.
local function digits(n)
  return string.format('%.0f', n)
end

local function set(field, value)
  S[field] = value
  changes[field] = true
end

-- A group that nobody declared or serves is forgotten when nobody asks for it any more, such as a misspelt name.
local function keep_if_declared()
  for _, key in ipairs({ state_key, queue_key, waiters_key, alive_key, ended_key, inbox_key, events_key }) do
    if S.mode == '' then
      redis.call('EXPIRE', key, UNDECLARED_KEEP_S)
    else
      redis.call('PERSIST', key)
    end
  end
end

-- A group that is declared or served draws no number below its birth. Whoever brings one knew the group before it was
-- born, so its data was lost, however far the counter has come since.
local function be_born()
  if S.mode ~= '' and S.birth == 0 then
    set('birth', changes.mode and now or LOSS_NOTED) -- an older version of the scripts has made it
    set('counter', math.max(S.counter, now))
  end
end

local function save()
  set('clock_ms', now)
  be_born()
  local flat = {}
  for field in pairs(changes) do
    local value = S[field]
    flat[#flat + 1] = field
    flat[#flat + 1] = type(value) == 'number' and digits(value) or value
  end
  redis.call('HSET', state_key, unpack(flat))
  if S.mode == '' or changes.mode then
    keep_if_declared()
  end
  changes = {}
end

local function emit(kind, ...)
  redis.call('XADD', events_key, 'MAXLEN', '~', EVENTS_KEPT, '*', 'v', '1', 'type', kind, 'at_ms', digits(now), ...)
end

local function wake(why)
  redis.call('XADD', inbox_key, 'MAXLEN', '~', INBOX_KEPT, '*', 'why', why)
end

local function draw()
  set('counter', math.max(S.counter + 1, now))
  return S.counter
end

local function set_phase(phase, reason)
  if S.phase ~= phase or S.reason ~= reason then
    if S.phase ~= phase then
      set('since_ms', now)
      if phase == 'blocked' then
        emit('GroupBlocked', 'reason', reason)
      end
    end
    set('phase', phase)
    set('reason', reason)
  end
end

local function clear_swap()
  set('swap_id', 0)
  set('swap_waiter', '')
  set('swap_job', '')
  set('swap_step', '')
  set('plan', '')
  set_phase('idle', '')
end

-- What had to leave is out, or (with a reason) an order that it leave is dropped.
local function end_eviction(reason)
  set('evict', '')
  set('evict_how', '')
  set('force', '')
  set('evict_reason', reason)
end

-- Why operators let nobody in, or ''.
local function pause_reason()
  return S.paused == '' and S.drains ~= '' and 'drained: ' .. S.drains or S.paused
end

-- Each node says what is on its devices before anybody is granted.
local function ask_all_nodes()
  local unheard = ''
  for _, node in ipairs(redis.call('ZRANGE', nodes_key, 0, -1)) do
    unheard = unheard .. ' ' .. node .. ' '
  end
  set('unheard', unheard)
end

-- How many ranks a gang has, as stored: whatever stands there, no script looks for more than it can.
local function world_of(text)
  return math.min(tonumber(text) or 0, WORLD_MAX)
end

-- The ranks inside that have renewed by themselves, and may do so again, did it at this time.
local function parties_renewed(at_ms)
  for rank = 0, world_of(S.gang) - 1 do
    local field = S.lease_id .. '/party/' .. rank
    local party = redis.call('HGET', waiters_key, field)
    if party and string.find(party, ' [1-9]%d*$') then
      redis.call('HSET', waiters_key, field, (string.gsub(party, '%d+$', digits(at_ms))))
    end
  end
end

-- A restart or a failover may have lost the last writes, and what is left does not show it. Where INFO is forbidden
-- the loss is noticed by the first caller who knows more.
local function notice_another_server()
  local info = redis.pcall('INFO', 'server')
  local id = type(info) == 'string' and string.match(info, 'run_id:(%w+)')
  local known = redis.call('HGET', state_key, 'server')
  if id and id ~= known then
    set('server', id)
    if known then
      ask_all_nodes()
      set('renewed_at_ms', 0) -- its yield may be lost: its agent vouches again when the client itself has renewed
      parties_renewed(0)
    end
  end
end

-- The server knows less than somebody else does. What it says of leases and swaps may be old, so nobody is granted while
-- holders renew and agents tell what is there; and a swap that began before what was lost is nobody's any more.
local function note_loss()
  set('counter', math.max(S.counter, floor))
  set('birth', LOSS_NOTED)
  set('seq', math.max(S.seq, floor))
  set('quiet_until_ms', math.max(S.quiet_until_ms, now + math.min(math.max(S.lease_ms, LEASE_MS), MAX_PAUSE_MS)))
  set('quiet_why', '')
  if S.swap_id ~= 0 then
    clear_swap()
  end
  ask_all_nodes()
  emit('StateLost', 'floor', digits(floor))
end

-- The full term of an entry in alive: of a waiter, of a rank whose gang waits, or of one that is inside.
local function term_of(member)
  local gang, rank = string.match(member, '^([^/]+)/(%d+)$')
  if gang and gang == S.lease_id
    and string.find(redis.call('HGET', waiters_key, gang .. '/party/' .. rank) or '', ' %d+$') then
    return S.lease_ms
  end
  return tonumber(redis.call('HGET', waiters_key, (gang or member) .. '/ttl_ms') or WAITER_TTL_MS)
end

-- After a clock step or an outage nobody had the chance to renew: everyone gets a full term again, once for each sign
-- of life. The server can't tell an outage from a group where nothing happened for a while, and in such a group
-- whoever looks in now and then would else keep the dead alive for ever.
local function rebase()
  local back, late = now < S.clock_ms, false
  local function again(deadline, term)
    late = late or deadline < now
    if back then
      return now + term -- no silence looks like this
    elseif deadline - term >= S.rebased_ms then
      return now + term - 1 -- one less than a sign of life at this moment would give
    end
    return deadline
  end
  if S.lease_id ~= '' then
    set('deadline_ms', again(S.deadline_ms, S.confirmed == '1' and S.lease_ms or WAITER_TTL_MS))
    if S.renewed_at_ms > 0 then
      set('renewed_at_ms', now)
    end
    parties_renewed(now)
  end
  if S.owner ~= '' then
    set('owner_deadline_ms', again(S.owner_deadline_ms, OWNER_MS))
  end
  local alive = redis.call('ZRANGE', alive_key, 0, -1, 'WITHSCORES')
  for i = 1, #alive, 2 do
    redis.call('ZADD', alive_key, again(tonumber(alive[i + 1]), term_of(alive[i])), alive[i])
  end
  local nodes = redis.call('ZRANGE', nodes_key, 0, -1, 'WITHSCORES')
  for i = 1, #nodes, 2 do
    redis.call('ZADD', nodes_key, again(tonumber(nodes[i + 1]), NODE_TTL_MS), nodes[i])
  end
  if S.swap_id ~= 0 then
    set('swap_deadline_ms', now + S.swap_budget_ms)
    set('swap_since_ms', math.min(S.swap_since_ms, now))
  end
  if S.quiet_until_ms > S.clock_ms then
    -- Once: else who looks in rarely would prolong it for ever. What is longer stays, as far away as it was.
    local left = S.quiet_until_ms - S.clock_ms
    set('quiet_until_ms', math.max(again(S.quiet_until_ms, LEASE_MS), back and now + left or S.quiet_until_ms))
  end
  set('changed_ms', math.min(S.changed_ms, now)) -- from the future it would undo every deferral at once
  set('rebased_ms', back and math.min(S.rebased_ms, now) or now)
  if back then
    emit('ClockStepped', 'from_ms', digits(S.clock_ms))
  elseif late then -- a silence that cost nobody anything is not worth a word
    emit('TermsRenewed', 'silent_ms', digits(now - S.clock_ms))
  end
end

-- A number that somebody brings raises what this group draws next, for good. One near the end of all numbers would stop
-- tokens from rising, and everybody would keep it: it is refused before the first write.
local function check_number(what, number)
  if number > math.max(now, S.counter, S.seq) + AHEAD_MS then
    error(redis.error_reply('ERR the ' .. what .. ' ' .. digits(number) .. " lies more than a year ahead of the server's"
      .. ' clock (' .. digits(now) .. ' ms since 1970), and nothing was changed; set the clock if it is wrong'))
  end
  return number
end

-- Reads the state. `frees` marks a script that must run even when the server is full: its first write deletes.
-- `longest`: bytes that an argument may have. What is stored is handed out again at every look, to everybody.
local function begin(frees, longest)
  longest = longest or RECORD_MAX
  for i = 1, #ARGV do
    if #ARGV[i] > longest then
      error(redis.error_reply('ERR argument ' .. i .. ' has ' .. #ARGV[i] .. ' bytes; at most ' .. longest .. ' are taken'))
    end
  end
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  floor = tonumber(ARGV[1])
  local v = redis.call('HMGET', state_key,
    'mode', 'phase', 'reason', 'lease_id', 'job', 'confirmed', 'host', 'pid', 'start', 'label', 'how',
    'swap_waiter', 'swap_job', 'swap_step', 'plan', 'owner', 'paused', 'evict', 'closed', 'closed_for',
    'unheard', 'since_ms', 'clock_ms', 'counter', 'seq', 'token', 'granted_at_ms', 'deadline_ms', 'lease_ms',
    'renewed_at_ms', 'swap_ms', 'swap_id', 'swap_since_ms', 'swap_deadline_ms', 'swap_budget_ms',
    'owner_epoch', 'owner_deadline_ms', 'changed_ms', 'quiet_until_ms', 'rebased_ms', 'force', 'waits_on',
    'evict_how', 'evict_reason', 'evict_tried_ms', 'evict_until_ms', 'drains', 'quiet_why', 'fence', 'gang', 'ending',
    'birth')
  -- Written out: a loop over names would cost every call several microseconds.
  S = {
    mode = v[1] or '', phase = v[2] or '', reason = v[3] or '', lease_id = v[4] or '', job = v[5] or '',
    confirmed = v[6] or '', host = v[7] or '', pid = v[8] or '', start = v[9] or '', label = v[10] or '',
    how = v[11] or '', swap_waiter = v[12] or '', swap_job = v[13] or '', swap_step = v[14] or '',
    plan = v[15] or '', owner = v[16] or '', paused = v[17] or '', evict = v[18] or '', closed = v[19] or '',
    closed_for = v[20] or '', unheard = v[21] or '',
    since_ms = tonumber(v[22]) or 0, clock_ms = tonumber(v[23]) or 0, counter = tonumber(v[24]) or 0,
    seq = tonumber(v[25]) or 0, token = tonumber(v[26]) or 0, granted_at_ms = tonumber(v[27]) or 0,
    deadline_ms = tonumber(v[28]) or 0, lease_ms = tonumber(v[29]) or 0, renewed_at_ms = tonumber(v[30]) or 0,
    swap_ms = tonumber(v[31]) or 0, swap_id = tonumber(v[32]) or 0, swap_since_ms = tonumber(v[33]) or 0,
    swap_deadline_ms = tonumber(v[34]) or 0, swap_budget_ms = tonumber(v[35]) or 0,
    owner_epoch = tonumber(v[36]) or 0, owner_deadline_ms = tonumber(v[37]) or 0,
    changed_ms = tonumber(v[38]) or 0, quiet_until_ms = tonumber(v[39]) or 0,
    rebased_ms = tonumber(v[40]) or 0, force = v[41] or '', waits_on = v[42] or '', evict_how = v[43] or '',
    evict_reason = v[44] or '', evict_tried_ms = tonumber(v[45]) or 0, evict_until_ms = tonumber(v[46]) or 0,
    drains = v[47] or '', quiet_why = v[48] or '', fence = tonumber(v[49]) or 0, gang = v[50] or '', ending = v[51] or '',
    birth = tonumber(v[52]) or 0,
  }
  if S.phase == '' then
    S.phase = 'idle'
  end
  check_number('floor', floor)
  if frees then
    redis.call('HDEL', state_key, '_')
  end
end

-- First write of every mutating script, once its arguments have been found good.
local function settle_clock()
  if S.clock_ms > 0 and (now < S.clock_ms or now > S.clock_ms + CLOCK_JUMP_MS) then
    rebase()
  end
  if S.mode == 'served' and now > S.clock_ms + SERVER_CHANGE_MS then
    notice_another_server()
  end
  if floor > S.counter or (floor > 0 and floor < S.birth) then
    note_loss()
  end
end

local function start_in(record)
  return string.match(record, '"start"%s*:%s*(%d+)')
end

local function namespace_in(record)
  return string.match(record, '"pid_namespace"%s*:%s*"([^"]*)"')
end

-- Under what name the group has this very process on record, if it has. A reused pid comes with another start time.
local function registered_as(job, node, pid, start)
  local field = job .. '/' .. node .. '/' .. pid
  local record, apart = redis.call('HGET', targets_key, field), field .. '@' .. start
  if record and start_in(record) == start then
    return field
  end
  return redis.call('HEXISTS', targets_key, apart) == 1 and apart or nil
end

-- 0 if an agent of its node serves the group and has not been told of this process, else 1.
local function is_known_there(job, node, pid, start)
  local unknown = S.mode == 'served' and redis.call('ZSCORE', nodes_key, node)
    and not registered_as(job, node, pid, start)
  return unknown and 0 or 1
end

-- Whether this node's agent may speak of a process that calls its host so: by its own name, or by one that no node has,
-- as a container does. Then it has seen the process, and knows it by job, number and start time.
local function answers_for(node, host)
  return host == node or not redis.call('ZSCORE', nodes_key, host)
end

-- The name that a record gets. Two containers may have the same number: the second one's start time is in its name.
local function target_field(job, node, pid, record)
  local field, start = job .. '/' .. node .. '/' .. pid, start_in(record)
  local known = start and registered_as(job, node, pid, start)
  local other = redis.call('HGET', targets_key, field)
  if known or not (other and start) or namespace_in(other) == namespace_in(record) then
    return known or field
  end
  return field .. '@' .. start
end

-- Is this the swap that is under way, and its caller the group's owner? Numbers as they came, in ARGV.
local function is_swap(swap, epoch)
  return S.swap_id ~= 0 and S.swap_id == tonumber(swap) and S.owner_epoch == tonumber(epoch)
end
